"""Runs with adapters: resumed, with a moved or changed base, merged, served, and continued by other runs."""

import contextlib
import io
import json
import shutil

import jax
import numpy as np
import pytest
from run_cases import assert_equal, train
from support import ALL_COMBINATIONS

from trainer.config.resolve import resolve
from trainer.export import main as export
from trainer.generate import main as generate
from trainer.inference.adapters import with_adapters
from trainer.weights.contents import contents_of
from trainer.weights.load import of_checkpoint
from trainer.weights.open import open_adapters

pytestmark = pytest.mark.usefixtures("equal_programs")
FIRST, LAST = ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]
LORA = {"enable_lora": True, "lora_rank": 2, "lora_alpha": 4.0}
RUN = {
    "learning_rate_schedule_steps": 6,
    "checkpoint_period": 3,
    "eval_interval": -1,
    "dropout_rate": 0.0,
    "base_num_decoder_layers": 2,
    "logits_via_embedding": False,
    "learning_rate": 0.1,
    "dataset_type": "stdlib",
    "vocab_size": 300,
    "prompt": "''",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with the run `base`, the run `one` with adapters for it, and `sum`, their exported sum."""
    found = tmp_path_factory.mktemp("lora")
    corpus = found / "text.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"def f{i}(x): return {i * 7} + x"}) + "\n" for i in range(300)))
    data = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": corpus, "held_out_share": 0.1}
    run(found, "base", steps=3, learning_rate=0.01, opt_type="sgd", **data)
    run(found, "one", steps=6, load_parameters_path="runs/base", **LORA, **data)
    with contextlib.chdir(found):
        export(["runs/one", "sum", "format=params", "load_parameters_path=runs/base"])
    return found, data


def run(folder, name, *words, refused="", combination=FIRST, **keys):
    code, output = train(folder, *words, run_name=name, **{"combination": combination} | RUN | keys)
    assert (code, refused in output) == (2 if refused else 0, True), output
    return output


def interrupted(folder, name, of):
    """Creates the run `name`: a copy of the six-update run `of` in its state after three updates."""
    copy = folder / "runs" / name
    shutil.copytree(folder / "runs" / of, copy)
    (copy / "finished").unlink()
    shutil.rmtree(copy / "checkpoints" / "6")


def test_a_run_is_resumed(folder):
    """Under another combination and from a moved base; a base with other values is refused."""
    found, data = folder
    keys, base = {"load_parameters_path": "runs/base", **LORA, **data}, found / "runs" / "base"
    interrupted(found, "resumed", of="one")
    base.rename(found / "moved")
    try:
        output = run(found, "resumed", steps=6, combination=LAST, **keys, refused="there is no such folder")
        assert "runs/base" in output
        output = run(found, "resumed", steps=6, combination=LAST, **keys | {"load_parameters_path": "moved"})
        assert "load_parameters_path is ignored" not in output
    finally:
        (found / "moved").rename(base)
    assert_equal(found / "runs" / "resumed", found / "runs" / "one", updates=6)
    export([str(found / "runs" / "resumed"), str(found / "same"), "format=params", f"load_parameters_path={base}"])
    assert_same(values_of(found / "same"), values_of(found / "sum"))
    said = "trained on a base with other values: "
    run(found, "resumed", steps=6, refused=said, **keys | {"load_parameters_path": "sum"})


def test_a_checkpoint_has_adapters_and_their_moments(folder):
    found, _ = folder
    contents = contents_of(str(found / "runs" / "one"))
    names = {tensor.name for tensor in contents.tensors if tensor.part == "params"}
    assert len(names) == 2 * 7
    assert all(name.endswith(("/product/lora_a", "/product/lora_b")) for name in names)
    assert not any("embed" in tensor.name or tensor.name.endswith("kernel") for tensor in contents.tensors)
    assert contents.notes[0].endswith("runs/base/checkpoints/3")


def text_of(*words):
    """Returns the text that is generated on one device."""
    output, found = io.StringIO(), jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(jax, "devices", lambda: found)
        generate([*map(str, words), "prompt=def f", "max_target_length=30"])
    return output.getvalue()


@pytest.mark.rest(covered_by="unit/inference/test_adapters.py; unit/training/test_lora.py")
def test_merged_and_separate_adapters_generate_the_same_text(folder, tmp_path, monkeypatch):
    """A run with LoRA is its base plus adapters; several adapters share a base and a batch."""
    found, data = folder
    own = LORA | {"lora_rank": 3, "lora_alpha": 1.5, "lora_module_path": "self_attention/(query|value)"}
    run(found, "two", steps=3, load_parameters_path="runs/base", data_shuffle_seed=1, **own, **data)
    monkeypatch.chdir(found)
    base, one, two = (f"runs/{name}" for name in ("base", "one", "two"))
    merged = [text_of(path) for path in (one, two)]
    assert len({*merged, text_of(base)}) == 3
    assert text_of(base, f"adapters={two}") == merged[1]
    for how in ((), ("enable_prefix_caching=true",), ("use_chunked_prefill=true", "prefill_chunk_size=4")):
        both = text_of(base, f"adapters={one},{two}", *how)
        assert both == f"== {one} ==\n{merged[0]}== {two} ==\n{merged[1]}"
    keys = [f"{key}={value}" for key, value in LORA.items()]
    assert text_of(base, f"lora.lora_restore_path={one}", *keys) == merged[0]
    export([one, str(tmp_path / "hf"), "format=hf"])
    assert text_of(tmp_path / "hf", "add_bos=false") == text_of(one, "add_bos=false")


def test_what_is_exported_is_the_sum(folder, tmp_path, monkeypatch, capsys):
    found, _ = folder
    monkeypatch.chdir(found)
    with pytest.raises(SystemExit) as exited:
        export(["runs/one", str(tmp_path / "changed"), "format=params", "load_parameters_path=sum"])
    assert exited.value.code == 2
    said = "its adapters were trained on a base with other values: decoder/layers/"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "changed").exists()
    whole, base, adapters = (values_of(path) for path in ("sum", "runs/base", "runs/one"))
    name = "decoder/layers/self_attention/out"
    a, b = (adapters[f"{name}/product/lora_{which}"] for which in "ab")
    expected = base[f"{name}/kernel"] + 2 * np.einsum("lhdr,lre->lhde", a, b)
    np.testing.assert_allclose(whole[f"{name}/kernel"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(whole["token_embedder/embedding"], base["token_embedder/embedding"])


def values_of(path):
    return {tensor.name: np.concatenate([*tensor.read()]) for tensor in contents_of(str(path)).tensors if tensor.shape}


def params_of(path):
    tensors = contents_of(str(path)).tensors
    return {tensor.name: np.concatenate([*tensor.read()]) for tensor in tensors if tensor.part == "params"}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name])


@pytest.mark.rest(covered_by="a run that resumes; unit/weights/test_peft.py")
def test_a_run_begins_with_adapters(folder):
    found, data = folder
    keys = {"load_parameters_path": "runs/base", "lora_restore_path": "runs/one", "steps": 1, **data}
    run(found, "again", **keys, **LORA, save_checkpoint_on_start=True)
    assert_same(params_of(found / "runs/again/checkpoints/0"), params_of(found / "runs/one"))
    shutil.copytree(found / "runs/one", found / "copy")
    described = keys | {"lora_restore_path": "copy", "enable_lora": True}
    output = run(found, "described", **described)
    assert "lora_restore_path=copy gives its adapters' keys: lora_rank=2, lora_alpha=4.0, lora_module_path=" in output
    shutil.rmtree(found / "copy")
    output = run(found, "described", **described | {"steps": 2})  # the same command resumes it
    assert "lora_restore_path is ignored: the run has its own checkpoint" in output
    refused = "give lora_rank=2 lora_alpha=4.0"
    run(found, "rank", refused=refused, **keys, **LORA | {"lora_rank": 4, "lora_alpha": 1.0})
    run(found, "none", refused="it trained all parameters", **keys | {"lora_restore_path": "runs/base"}, **LORA)
    refused = "checkpoints/3; give their path with load_parameters_path"
    run(found, "unplaced", refused=refused, **keys | {"load_parameters_path": ""}, **LORA)
    run(found, "of", refused="other values", **keys | {"load_parameters_path": "runs/one"}, **LORA)


@pytest.mark.rest(covered_by="a run that resumes; unit/weights/test_peft.py")
def test_adapters_of_initial_parameters(tmp_path):
    keys = {"steps": 1, "base_num_decoder_layers": 1, "dataset_type": "synthetic", **LORA}
    run(tmp_path, "first", **keys, rope_interleave=True)
    refused = "give rope_interleave=true"
    run(tmp_path, "order", **keys, lora_restore_path="runs/first", refused=refused)
    keys |= {"rope_interleave": True}
    run(tmp_path, "next", **keys, lora_restore_path="runs/first", save_checkpoint_on_start=True)
    assert_same(params_of(tmp_path / "runs/next/checkpoints/0"), params_of(tmp_path / "runs/first"))
    refused = "other values: decoder/layers/mlp/wi_0/kernel"
    run(tmp_path, "seed", **keys, lora_restore_path="runs/first", init_weights_seed=5, refused=refused)


@pytest.mark.rest(covered_by="unit/weights/test_peft.py; a run that begins with adapters")
def test_a_folder_of_peft_takes_the_place_of_a_run(folder, tmp_path, monkeypatch):
    found, data = folder
    monkeypatch.chdir(found)
    peft = tmp_path / "peft"
    export(["runs/one", str(peft), "format=peft"])
    export([str(peft), str(tmp_path / "again"), "format=peft", "load_parameters_path=runs/base"])
    files = [path / "adapter_model.safetensors" for path in (peft, tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert text_of("runs/base", f"adapters={peft}") == text_of("runs/one")
    keys = {"load_parameters_path": "runs/base", "lora_restore_path": peft, "enable_lora": True, **data}
    run(found, "from-peft", steps=1, save_checkpoint_on_start=True, **keys)
    begin = contents_of(str(found / "runs/from-peft/checkpoints/0")).tensors
    adapters = values_of(found / "runs/one")
    for tensor in begin:
        if tensor.part == "params":
            np.testing.assert_array_equal(np.concatenate([*tensor.read()]), adapters[tensor.name])


def test_qlora_is_resumed_and_merged(folder, monkeypatch):
    """The base is quantized when it is loaded; the adapters are trained for the dequantized values."""
    found, data = folder
    stored = {"lora_weight_qtype": "nf4", "lora_tile_size": 4}
    own = LORA | stored | {"lora_module_path": "self_attention/(query|out)"}
    keys = {"load_parameters_path": "runs/base", **own, **data}
    run(found, "q", steps=6, **keys)
    interrupted(found, "q-resumed", of="q")
    run(found, "q-resumed", steps=6, **keys)
    assert_equal(found / "runs" / "q-resumed", found / "runs" / "q", updates=6)
    monkeypatch.chdir(found)
    words = [f"{key}={value}" for key, value in own.items()]
    assert text_of("runs/q") == text_of("runs/base", "lora_restore_path=runs/q", *words)
    base = resolve(of_checkpoint("runs/base", [], None)[0].config, device_count=1, platform="cpu")
    config, _ = with_adapters(base, [open_adapters("runs/q")])
    assert {key: config[key] for key in stored} == stored


def test_the_command_of_maxtext(folder):
    found, data = folder
    maxtext = {f"lora.{key}": value for key, value in LORA.items()}
    output = run(found, "maxtext", steps=1, **maxtext, **data)
    assert "adapters     rank 2, scale 2: decoder/layers (mlp/wi_0, " in output
