"""Multi-token prediction modules in checkpoints: the published layout, MaxText's names, other numbers of modules."""

import json

import jax
import numpy as np
import pytest
from checkpoint_cases import (
    FAMILIES,
    abstract_of,
    assert_same,
    config_of,
    hf_tensors,
    in_pairs,
    maxtext_params,
    random_params,
    read_hf,
    shapes_of,
    write_hf,
    write_maxtext,
)
from support import arguments

from trainer import export
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.leaves.source import names_of
from trainer.training.build import build
from trainer.training.start import start
from trainer.weights.huggingface.write import write_huggingface
from trainer.weights.load import load_parameters
from trainer.weights.maxtext.model_arguments import maxtext_keys
from trainer.weights.model_keys import described, model_config
from trainer.weights.open import open_source

LAYERS, BLOCK = 2, "transformer_layer"
# The names in DeepSeek-V3's README_WEIGHTS.md and index, and ours.
PARTS = {
    "enorm.weight": "embedding_norm/scale",
    "hnorm.weight": "hidden_state_norm/scale",
    "eh_proj.weight": "projection/kernel",
    "shared_head.norm.weight": "final_norm/scale",
}


def config(block="llama2", **keys):
    return config_of(decoder_block=block, **(FAMILIES[block] | {"mtp_num_layers": 2, "head_dim": 16} | keys))


def published(params):
    """Returns Hugging Face's tensors of `params`, including the modules."""
    model = {name: value for name, value in params.items() if not name.startswith("mtp_block/")}
    tensors = hf_tensors(model)
    for k in (1, 2):
        own = {
            name.removeprefix(f"mtp_block/mtp_layer_{k}/mtp_{k}_"): value
            for name, value in params.items()
            if name.startswith(f"mtp_block/mtp_layer_{k}/")
        }
        for theirs, ours in PARTS.items():
            tensors[f"model.layers.{LAYERS + k - 1}.{theirs}"] = own[ours].T
        # The module's block is exported like a layer of another model.
        one = {f"decoder/layers/{name.removeprefix(f'{BLOCK}/')}": value[None] for name, value in own.items()}
        layer = hf_tensors(one | {name: model[name] for name in model if not name.startswith("decoder/layers/")})
        for name, value in layer.items():
            if name.startswith("model.layers.0."):
                tensors[name.replace("layers.0", f"layers.{LAYERS + k - 1}")] = value
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}


def loaded(path, config, given=(), say=lambda line: None):
    return load_parameters(str(path), config, abstract_of(config), say, given)


@pytest.mark.parametrize(("block", "interleave"), [("llama2", True), ("qwen3", False)])
def test_the_published_layout(tmp_path, block, interleave):
    cfg = config(block, rope_interleave=interleave)
    params = random_params(cfg)
    tensors = published(params)
    copies = {f"model.layers.{n}.embed_tokens.weight": tensors["model.embed_tokens.weight"] for n in (2, 3)}
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    copies |= {f"model.layers.{n}.shared_head.head.weight": head for n in (2, 3)}
    path = write_hf(tmp_path / "theirs", cfg, tensors | copies, num_nextn_predict_layers=2)
    ours = in_pairs(params) if interleave else params
    assert open_source(str(path)).keys["mtp_num_layers"] == 2
    assert_same(loaded(path, cfg), ours)

    out = tmp_path / "ours"
    out.mkdir()
    write_huggingface(out, cfg, open_source(str(path)).leaves(cfg, shapes_of(cfg)), None)
    assert_same(read_hf(out), tensors)
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 2

    changed = copies | {"model.layers.3.embed_tokens.weight": copies["model.layers.3.embed_tokens.weight"] + 1}
    write_hf(tmp_path / "another", cfg, tensors | changed)
    with pytest.raises(
        UserError, match=r"share model.embed_tokens.weight, but model.layers.3.embed_tokens.weight differs"
    ):
        loaded(tmp_path / "another", cfg)


def test_modules_that_transformers_dropped_are_none(tmp_path):
    cfg = config(mtp_num_layers=0)
    params = random_params(cfg)
    path = write_hf(tmp_path / "theirs", cfg, hf_tensors(params), num_nextn_predict_layers=1)
    assert_same(loaded(path, cfg), params)


@pytest.mark.parametrize("modules", [0, 1])
def test_modules_are_left_out(tmp_path, modules):
    whole, cfg = config(), config(mtp_num_layers=modules)
    params = random_params(whole)
    path = write_hf(tmp_path / "theirs", whole, published(params))
    lines = []
    wanted = {name: params[name] for name in shapes_of(cfg)}
    assert_same(loaded(path, cfg, ["mtp_num_layers"], lines.append), wanted)
    assert lines == [f"{path} has mtp_num_layers=2; mtp_num_layers={modules} was given and takes precedence"]
    with pytest.raises(UserError, match="to load it, give: mtp_num_layers=2"):
        loaded(path, cfg)

    export.main([str(path), str(tmp_path / "params"), "format=params", f"mtp_num_layers={modules}"])
    assert_same(loaded(tmp_path / "params", cfg), wanted)
    export.main([str(tmp_path / "params"), str(tmp_path / "hf"), "format=hf"])
    theirs = published(params)
    kept = {name for name in theirs if not name.startswith(tuple(f"model.layers.{n}." for n in range(2 + modules, 4)))}
    assert_same(read_hf(tmp_path / "hf"), {name: theirs[name] for name in kept})


@pytest.mark.parametrize("words", [[], ["mtp_num_layers=0"], ["mtp_num_layers=1"], ["mtp_num_layers=2"]])
def test_a_preset_says_nothing_of_modules(words):
    cfg = load(["base.yml", "dataset_type=synthetic", "model_name=llama2-7b", "mtp_num_layers=1"]).config
    keys = described(resolve(cfg, device_count=1, platform="cpu"))
    asked = int(words[0].partition("=")[2]) if words else 1
    assert model_config(keys, ["model_name=llama2-7b", *words], "there").mtp_num_layers == asked
    with pytest.raises(UserError, match="there contains a different model"):
        model_config(keys, ["model_name=mistral-7b", *words], "there")


def test_new_modules_begin_as_drawn(tmp_path):
    """A run that starts from a model without modules draws the modules' initial parameters like a fresh run."""
    keys = {"logits_via_embedding": False, "mtp_num_layers": 1, "opt_type": "sgd"}
    without = build(load(arguments("nnx", **keys | {"mtp_num_layers": 0})).config, jax.devices()[:1])
    params = random_params(without.config)
    path = write_hf(tmp_path / "theirs", without.config, hf_tensors(params))
    run = build(load([*arguments("nnx", **keys), f"load_parameters_path={path}"]).config, jax.devices()[:1])
    lines = []
    begin = start(run, None, None, lines.append, schedule_given=False, given=["mtp_num_layers"])
    found = names_of(run.codec.unpack(begin.state).params)
    drawn = names_of(run.codec.unpack(run.init()).params)
    assert_same(found, {name: params.get(name, np.asarray(leaf)) for name, leaf in drawn.items()})
    new = "mtp_block/mtp_layer_1"
    told = [line for line in lines if not line.startswith("loading: ")]  # printed only on a busy machine
    assert told[-1] == f"{path}: absent, with initial values: {new}"


@pytest.mark.rest(covered_by="scanned layers; unit/weights/test_maxtext.py", cases=("False-False",))
@pytest.mark.parametrize(("scanned", "own_norm"), [(True, True), (True, False), (False, False)])
def test_maxtext(tmp_path, scanned, own_norm):
    """Modules of MaxText 0.2.4 share the model's final norm; those of 0.2.5 have separate norms."""
    cfg = config()
    params = random_params(cfg)
    stored = maxtext_params(cfg, params, scanned=scanned)
    stored = {name: value for name, value in stored.items() if own_norm or "final_norm" not in name}
    lines = []
    wanted = {
        name: params["decoder/decoder_norm/scale"] if "final_norm" in name and not own_norm else value
        for name, value in params.items()
    }
    path = write_maxtext(tmp_path / "items", stored)
    assert_same(loaded(path, cfg, say=lines.append), wanted)
    assert "before the final norm" in lines[-1]
    assert ("starts as a copy" in lines[-1]) != own_norm
    assert not any("left out" in line for line in lines)
    for modules, left in {0: "1, 2", 1: "2"}.items():
        lines = []
        cfg_of_fewer = config(mtp_num_layers=modules)
        kept = {name: wanted[name] for name in shapes_of(cfg_of_fewer)}
        assert_same(loaded(path, cfg_of_fewer, say=lines.append), kept)
        assert any("before the final norm" in line for line in lines) == (modules > 0)
        assert lines[-1] == (
            f"{path}: its modules of multi-token prediction are left out: {left}; mtp_num_layers=2 loads them"
        )
    with pytest.raises(UserError, match="mtp_num_layers=2: its modules read hidden states before the final norm"):
        maxtext_keys(cfg)
