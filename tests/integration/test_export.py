"""`python -m trainer.export` as a user runs it."""

import json
import os
import shlex
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
from run_cases import command
from support import TINY, arguments, pinned, tiny_config

from trainer import train
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.export import main
from trainer.leaves.source import names_of
from trainer.weights.load import load_parameters


def failure(capsys, *argv):
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in argv])
    assert exit_.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("block", "keys", "dtype", "shards", "interleave"),
    [
        ("llama2", ROPES["llama3.1"], np.float32, 3, True),
        ("llama2", {"logits_via_embedding": True, "normalize_embedding_logits": False}, BFLOAT16, 1, False),
        ("mistral", ROPES["yarn"], BFLOAT16, 2, True),
        ("qwen3", {}, np.float32, 1, False),
        ("qwen3_moe", {}, BFLOAT16, 3, True),
        ("mixtral", {}, np.float32, 1, False),
        ("qwen3", {"logits_via_embedding": False}, BFLOAT16, 3, True),
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
    assert "entries as adjacent pairs" in capsys.readouterr().out
    for more in ([], ["rope_interleave=true"]):
        message = failure(capsys, items, tmp_path / "no", "format=params", *more)
        assert "this checkpoint does not contain its model's keys; give model_name=... or its keys" in message
    message = failure(capsys, items, tmp_path / "no", "format=params", "model_name=mistral-7b")
    assert "decoder/logits_dense/kernel: found [16, 64], wanted [4096, 32000]" in message
    assert not list(tmp_path.glob("no*"))


@pytest.mark.parametrize("scan", ["", "scan_layers=false"])
def test_to_maxtext(tmp_path, capsys, scan):
    keys = FAMILIES["llama2"] | ROPES["yarn"] | {"head_dim": 16}
    config = config_of(decoder_block="llama2", **keys)
    params = random_params(config)
    write_hf(tmp_path / "hf", config, hf_tensors(params))
    main([str(tmp_path / "hf"), str(tmp_path / "out"), "format=maxtext", *([scan] if scan else [])])
    *_, line = capsys.readouterr().out.splitlines()
    head, *given = shlex.split(line.partition("give: ")[2])
    assert head == f"load_parameters_path={tmp_path / 'out' / '0' / 'items'}"
    assert given[0] == (scan or "scan_layers=true")
    assert {"base_emb_dim=16", "rope_type=yarn", "rope_factor=4", "mlp_activations=[silu,linear]"} <= set(given)
    # The words of that line, except MaxText's own keys, suffice to export the folder back.
    given = [word for word in given if not word.startswith(("scan_layers=", "max_position_embeddings=", "rope_inter"))]
    main([str(tmp_path / "out"), str(tmp_path / "back"), "format=hf", *given])
    assert_same(read_hf(tmp_path / "back"), hf_tensors(params))
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_mistakes_of_an_export_to_maxtext(tmp_path, capsys):
    config = config_of(decoder_block="mistral", **FAMILIES["mistral"])
    write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    hf, out = tmp_path / "hf", tmp_path / "out"
    assert "scan_layers=maybe: " in failure(capsys, hf, out, "format=maxtext", "scan_layers=maybe")
    assert "scan_layers: not a key of the model" in failure(capsys, hf, out, "format=hf", "scan_layers=true")
    main([str(hf), str(out), "format=maxtext", "dtype=bfloat16", "max_target_length=77"])
    shown = capsys.readouterr().out
    assert "max_target_length=77" in shown.splitlines()[-1]
    assert "results differ for rows longer than sliding_window_size=5" in shown
    assert "attention_type" not in shown.splitlines()[-1]


def test_the_command_line_may_not_contradict_the_source(tmp_path, capsys):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    hf, out = tmp_path / "hf", tmp_path / "out"
    main([str(hf), str(tmp_path / "same"), "format=params", "vocab_size=64", "rope_max_timescale=10000"])
    assert "vocab_size=64" in failure(capsys, hf, out, "format=hf", "vocab_size=65")
    message = failure(capsys, hf, out, "format=hf", "model_name=llama2-7b")
    assert "base_emb_dim=16" in message
    assert "rope_max_timescale" not in message  # llama2-7b has the same value
    assert not out.exists()


@pytest.mark.parametrize(
    ("block", "keys", "words_"),
    [
        ("llama2", ROPES["llama3.1"], ["rope_factor=8", "original_max_position_embeddings=32"]),
        ("llama2", ROPES["yarn"], ["beta_fast=16"]),
        ("mistral", {}, ["sliding_window_size=5"]),
        ("qwen3", {}, ["normalize_embedding_logits=false"]),
    ],
)
def test_what_the_source_says_may_be_repeated(tmp_path, capsys, block, keys, words_):
    config = config_of(decoder_block=block, **FAMILIES[block] | keys)
    write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    main([str(tmp_path / "hf"), str(tmp_path / "out"), "format=params", *words_])
    for word in words_:
        if "=false" not in word:
            message = failure(capsys, tmp_path / "hf", tmp_path / "no", "format=params", f"{word}1")
            assert f"give: {word.partition('=')[0]}=" in message


def test_keys_without_effect_are_refused(tmp_path, capsys):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    given = ["steps=3", "weight_dtype=bfloat16"]
    message = failure(capsys, tmp_path / "hf", tmp_path / "out", "format=hf", *given)
    assert "steps: not a key of the model\n" in message
    assert "weight_dtype: not a key of the model; dtype=..." in message
    message = failure(capsys, tmp_path / "hf", tmp_path / "out", "format=hf", "load_parameters_path=x")
    assert "load_parameters_path=x is the base of adapters, but" in message
    message = failure(capsys, tmp_path / "hf", tmp_path / "out", "format=hf", "beta_fast=3")
    assert "beta_fast" in message


def test_odd_places_to_write_to(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "full" / "x").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    for out, reason in (
        (tmp_path / "file" / "a" / "b", "file is a file"),
        (tmp_path / "link", "is a symbolic link"),
        ("~/full", "exists and is not an empty folder"),
        ("gs://bucket/out", "only a local folder can be written"),
    ):
        assert reason in failure(capsys, tmp_path, out, "format=hf")


def test_the_context_length_can_be_given(tmp_path, capsys):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)), max_position_embeddings=None)

    def exported(source, out, *more):
        main([str(tmp_path / source), str(tmp_path / out), "format=hf", *more])
        return json.loads((tmp_path / out / "config.json").read_text())["max_position_embeddings"]

    assert exported("hf", "a") == 128
    assert "max_position_embeddings=128 is written" in capsys.readouterr().out
    assert exported("hf", "b", "max_target_length=77") == 77
    assert exported("b", "c") == 77
    assert "is written" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_run(tmp_path):
    """Exports from a run's folder. A run of the last combination is exported in test_lora.py."""
    import orbax.checkpoint as orbax

    keys = {"steps": 2, "enable_checkpointing": True, "normalize_embedding_logits": False, "opt_type": "sgd"}
    keys |= {"base_output_directory": tmp_path, "run_name": "run", "per_device_batch_size": 1}
    train.main(arguments("nnx", **keys))
    run, hf, params = tmp_path / "run", tmp_path / "hf", tmp_path / "params"
    main([str(run), str(hf), "format=hf"])
    main([str(run), str(params), "format=params"])
    tree = orbax.PyTreeCheckpointer().restore((run / "checkpoints" / "2" / "state").absolute())
    stored = {name: np.asarray(value) for name, value in names_of(tree["params"]).items()}
    assert_same(read_hf(hf), hf_tensors(stored))
    config = tiny_config("nnx", **keys)
    assert_same(load_parameters(str(params), config, abstract_of(config), print), stored)
    assert json.loads((hf / "config.json").read_text())["max_position_embeddings"] == TINY["max_target_length"]
    assert (hf / "model.safetensors").is_file()


def test_the_guides_stretched_model_trains(tmp_path):
    sizes = TINY | pinned("nnx") | {"logits_via_embedding": False}
    config = resolve(load([f"{key}={value}" for key, value in sizes.items()]).config, device_count=1, platform="cpu")
    path = write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    keys = sizes | {"steps": 1, "per_device_batch_size": 1, "base_output_directory": tmp_path, "run_name": "long"}
    keys |= {"load_parameters_path": path, "rope_type": "yarn", "rope_factor": 4, "opt_type": "sgd", "prompt": ""}
    code, said = command(keys)
    assert (code, "has rope_type=default; rope_type=yarn was given and takes precedence" in said) == (0, True), said


def test_mistakes_of_the_command_line_are_told_at_once(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    message = failure(capsys, tmp_path, tmp_path / "full", "format=onnx", "dtype=int8")
    assert "exists and is not an empty folder" in message
    assert "format=onnx: allowed: hf, params, maxtext" in message
    assert "dtype=int8: allowed" in message
    assert "the first two arguments are FROM and OUT" in failure(capsys, "format=hf", "vocab_size=3")
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

    monkeypatch.setattr("trainer.weights.huggingface.safetensors_file.SafetensorsFile.write", full_disk)
    with pytest.raises(OSError, match="no space"):
        main([str(tmp_path / "hf"), str(tmp_path / "out"), "format=hf"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "params"]


def test_as_a_process(tmp_path, capsys):
    config = config_of(decoder_block="qwen3", **FAMILIES["qwen3"])
    write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    (tmp_path / "out").mkdir()  # an existing empty folder is accepted

    words = [sys.executable, "-m", "trainer.export", "hf", "out", "format=params"]
    done = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "config.yml").is_file()
    assert "not an empty folder" in failure(capsys, tmp_path / "hf", tmp_path / "out", "format=params")
    main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m trainer.export FROM OUT")
