"""Compares a program whose tokens are reordered with one whose rows are not split."""

import json

from parity_cases import run as parity

from trainer.compare import measure, programs


def words(record):
    return f"left={record}", "ici_context_parallelism=2", "per_device_batch_size=4", "rtol=1e-4", "--json"


def test_activations_of_each_token_are_equal(capsys, monkeypatch, tmp_path):
    """The left side is a record. Both sides have modules of multi-token prediction."""
    monkeypatch.setattr(programs, "MEASURES", programs.MEASURES[:2])
    record = tmp_path / "whole.safetensors"
    assert parity(capsys, f"record={record}", "arrays=true", mtp_num_layers=1)[0] == 0
    code, out, err = parity(capsys, *words(record), mtp_num_layers=1)
    assert code == 0, err + out
    found = json.loads(out)["comparisons"][0]["quantities"]
    assert {"embedding", "logits", "mtp_block/mtp_layer_1/output"} <= {
        it["name"] for it in found["activations"]["arrays"]
    }
    assert all(it["bits"] for it in found["activations"]["arrays"] if it["name"] == "embedding")
    monkeypatch.setattr(measure, "token_order", lambda config: None)
    code, out, _ = parity(capsys, *words(record), mtp_num_layers=1)
    assert code == 1
    assert json.loads(out)["comparisons"][0]["first"].startswith("activations: embedding")
