"""`python -m trainer.export` as a user runs it."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_cases import (
    BFLOAT16,
    FAMILIES,
    ROPES,
    abstract_of,
    assert_same,
    config_of,
    hf_tensors,
    maxtext_params,
    random_params,
    read_hf,
    words,
    write_hf,
    write_maxtext,
)

from trainer.checkpoint import load_parameters
from trainer.export import main


def failure(capsys, *argv):
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in argv])
    assert exit_.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize(
    ("block", "keys", "dtype", "shards"),
    [
        ("llama2", ROPES["llama3.1"], np.float32, 3),
        ("llama2", {"logits_via_embedding": True, "normalize_embedding_logits": False}, BFLOAT16, 1),
        ("mistral", ROPES["yarn"], BFLOAT16, 2),
        ("qwen3", {}, np.float32, 1),
        ("qwen3", {"logits_via_embedding": False}, BFLOAT16, 3),
    ],
)
def test_the_round_trip_is_exact(tmp_path, block, keys, dtype, shards, interleave):
    config = config_of(decoder_block=block, **FAMILIES[block] | keys)
    tensors = hf_tensors(random_params(config, dtype))
    hf, params, back, copy = (tmp_path / name for name in ("hf", "params", "back", "copy"))
    write_hf(hf, config, tensors, shards=shards)
    main([str(hf), str(params), "format=params", f"rope_interleave={interleave}"])
    main([str(params), str(back), "format=hf"])
    main([str(hf), str(copy), "format=hf", f"rope_interleave={interleave}"])
    for folder in (back, copy):
        assert_same(read_hf(folder), tensors)
        said = json.loads((folder / "config.json").read_text())
        assert (said["eos_token_id"], said["max_position_embeddings"]) == (7, 333)
        assert (folder / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.glob("*incomplete*"))


def test_a_cast(tmp_path, capsys):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    tensors = hf_tensors(random_params(config))
    write_hf(tmp_path / "hf", config, tensors)
    main([str(tmp_path / "hf"), str(tmp_path / "out"), "format=hf", "dtype=bfloat16"])
    assert_same(read_hf(tmp_path / "out"), {name: value.astype(BFLOAT16) for name, value in tensors.items()})
    shown = capsys.readouterr().out
    assert "model.safetensors" in shown
    assert f"{sum(value.size for value in tensors.values()) / 1000:.2f} k parameters" in shown


def test_from_maxtext_with_the_models_keys(tmp_path, capsys):
    keys = FAMILIES["mistral"] | ROPES["llama3.1"]
    config = config_of(decoder_block="mistral", **keys)
    params = random_params(config)
    items = write_maxtext(tmp_path / "0" / "items", maxtext_params(config, params, scanned=False))
    given = words(decoder_block="mistral", **keys)
    main([str(items), str(tmp_path / "out"), "format=params", *given])
    result = load_parameters(str(tmp_path / "out"), config, abstract_of(config), print)
    query = result["decoder"]["layers"]["self_attention"]["query"].pop("kernel")
    wanted = params.pop("decoder/layers/self_attention/query/kernel")
    np.testing.assert_allclose(query, wanted, rtol=1e-6)
    result["decoder"]["layers"]["self_attention"].pop("query")
    assert_same(result, params)
    # Without them the default model is meant, which this is not.
    assert "token_embedder/embedding: found [64, 16]" in failure(capsys, items, tmp_path / "no", "format=params")
    assert not list(tmp_path.glob("no*"))


def test_the_command_line_may_not_contradict_the_source(tmp_path, capsys):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    hf, out = tmp_path / "hf", tmp_path / "out"
    main([str(hf), str(tmp_path / "same"), "format=params", "vocab_size=64", "rope_max_timescale=10000"])
    assert "vocab_size=64" in failure(capsys, hf, out, "format=hf", "vocab_size=65")
    message = failure(capsys, hf, out, "format=hf", "model_name=llama2-7b")
    assert "base_emb_dim=16" in message
    assert "rope_max_timescale" not in message  # 7B has the same
    assert not out.exists()


def test_mistakes_of_the_command_line_are_told_at_once(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    message = failure(capsys, tmp_path, tmp_path / "full", "format=gguf", "dtype=int8")
    assert "exists and is no empty folder" in message
    assert "format=gguf: allowed: hf, params" in message
    assert "dtype=int8: allowed" in message
    assert "the first two words are FROM and OUT" in failure(capsys, "format=hf", "vocab_size=3")
    assert "nothing in it is a checkpoint" in failure(capsys, tmp_path, tmp_path / "out", "format=hf")
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    assert "nearest: vocab_size" in failure(capsys, tmp_path / "hf", tmp_path / "out", "format=hf", "vocab_siz=3")


def test_a_refused_or_broken_export_leaves_nothing(tmp_path, capsys, monkeypatch):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    main([str(tmp_path / "hf"), str(tmp_path / "params"), "format=params"])
    path = tmp_path / "params" / "config.yml"
    path.write_text(path.read_text() + "attn_logits_soft_cap: 30.0\n")
    assert "attn_logits_soft_cap=30" in failure(capsys, tmp_path / "params", tmp_path / "out", "format=hf")

    def full_disk(self, name, value):
        raise OSError("no space left on device")

    monkeypatch.setattr("trainer.checkpoint.safetensors_file.SafetensorsFile.write", full_disk)
    with pytest.raises(OSError, match="no space"):
        main([str(tmp_path / "hf"), str(tmp_path / "out"), "format=hf"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "params"]


def test_as_a_process(tmp_path):
    config = config_of(decoder_block="qwen3", **FAMILIES["qwen3"])
    write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    (tmp_path / "out").mkdir()  # empty is as good as absent

    def run(*argv):
        command = [sys.executable, "-m", "trainer.export", *map(str, argv)]
        return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), cwd=tmp_path)

    done = run("hf", "out", "format=params")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "config.yml").is_file()
    assert run("hf", "out", "format=params").returncode == 2
    assert run("--help").stdout.startswith("usage: python -m trainer.export FROM OUT")
