"""`load_parameters` from each kind of source, and what it refuses."""

import json
import re

import jax
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
    in_pairs,
    maxtext_params,
    random_params,
    write_hf,
    write_maxtext,
)
from support import ALL_COMBINATIONS, arguments

from trainer.checkpoint import load_parameters, names_of, nested, open_source
from trainer.config import UserError, load
from trainer.training import build


def silent(text):
    """Short work says nothing."""
    raise AssertionError(text)


def loaded(path, config, dtype=np.float32):
    return load_parameters(str(path), config, abstract_of(config, dtype), silent)


def refusal(path, config):
    with pytest.raises(UserError) as error:
        loaded(path, config)
    return str(error.value)


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("block", FAMILIES)
def test_hugging_face(tmp_path, block, shards, interleave):
    config = config_of(decoder_block=block, **FAMILIES[block], rope_interleave=interleave)
    params = random_params(config, BFLOAT16)
    tensors = hf_tensors(params) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    path = write_hf(tmp_path / "hf", config, tensors, shards=shards)
    assert_same(loaded(path, config, BFLOAT16), in_pairs(params) if interleave else params)


def test_one_layer(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"], base_num_decoder_layers=1)
    params = random_params(config)
    assert_same(loaded(write_hf(tmp_path / "hf", config, hf_tensors(params)), config), params)


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_result_has_the_dtypes_and_shardings_of_a_run(tmp_path, combination):
    sizes = {"decoder_block": "mistral", "logits_via_embedding": False, "per_device_batch_size": 1}
    mesh = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}
    run = build(load(arguments(combination, **sizes, **mesh)).config, jax.devices())
    abstract = run.backend.unpack(run.abstract_args()[0]).params
    params = random_params(run.config, BFLOAT16)
    path = write_hf(tmp_path / "hf", run.config, hf_tensors(params))
    result = load_parameters(str(path), run.config, abstract, silent)
    assert_same(result, {name: value.astype(np.float32) for name, value in params.items()})
    assert jax.tree.structure(result) == jax.tree.structure(abstract)
    for array, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(abstract), strict=True):
        assert array.sharding == wanted.sharding
    run.init(result)


def test_a_tied_model_may_hold_its_head(tmp_path):
    config = config_of(decoder_block="qwen3", **FAMILIES["qwen3"])
    params = random_params(config)
    tensors = hf_tensors(params)
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    assert_same(loaded(write_hf(tmp_path / "same", config, same), config), params)
    same["lm_head.weight"][-1, -1] += 1
    assert "lm_head.weight is not model.embed" in refusal(write_hf(tmp_path / "other", config, same), config)


def test_another_model_is_refused_with_all_that_differs(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    path = write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)), rms_norm_eps=1e-6, vocab_size=65)
    message = refusal(path, config)
    assert "vocab_size=65" in message
    assert "normalization_layer_epsilon=1.0e-06" in message
    assert "base_emb_dim" not in message
    # What it says to give is what loads it.
    keys = dict(word.split("=") for word in message.partition("give: ")[2].split())
    changed = config_of(decoder_block="llama2", **FAMILIES["llama2"] | keys)
    assert (changed.vocab_size, changed.normalization_layer_epsilon) == (65, 1e-6)


def broken(names):
    """Three mistakes in a dict of tensors: a missing, an extra and a misshaped one."""
    missing, misshaped = names
    return lambda tensors: (
        {name: value for name, value in tensors.items() if name != missing}
        | {misshaped: np.ones((3, 2), np.float32), "odd": np.ones(4, np.float32)}
    )


def assert_names_all(message, missing, misshaped):
    assert "3 tensors do not fit" in message
    assert re.search(rf"{missing}: missing, wanted \[", message)
    assert re.search(rf"{misshaped}: found \[3, 2\], wanted \[", message)
    assert re.search(r"odd: the model has no place for it, found \[4\]", message)


def test_tensors_that_do_not_fit_hugging_face(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    names = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    path = write_hf(tmp_path / "hf", config, broken(names)(hf_tensors(random_params(config))))
    assert_names_all(refusal(path, config), *names)


def test_tensors_that_do_not_fit_maxtext(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    names = "decoder/layers/mlp/wi_1/kernel", "decoder/decoder_norm/scale"
    stored = broken(names)(maxtext_params(config, random_params(config), scanned=True))
    assert_names_all(refusal(write_maxtext(tmp_path / "items", stored), config), *names)


def test_tensors_in_other_dtypes_are_refused(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    tensors = hf_tensors(random_params(config))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    assert "model.norm.weight: stored as I8" in refusal(write_hf(tmp_path / "hf", config, tensors), config)


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize(("block", "rope"), [("llama2", "default"), ("mistral", "llama3.1"), ("qwen3", "yarn")])
def test_maxtext(tmp_path, block, rope, scanned):
    for interleave in (False, True):
        config = config_of(decoder_block=block, **FAMILIES[block], **ROPES[rope], rope_interleave=interleave)
        params = random_params(config)
        items = tmp_path / str(interleave) / "0" / "items"
        write_maxtext(items, maxtext_params(config, params, scanned=scanned))
        result = names_of(loaded(items.parent, config))
        query = "decoder/layers/self_attention/query/kernel"
        params = in_pairs(params) if interleave else params
        # Divided by sqrt(head_dim) and multiplied again.
        np.testing.assert_allclose(result[query], params[query], rtol=1e-6)
        assert_same(result | {query: params[query]}, params)


def test_maxtext_is_read_without_its_moments(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    params = {name: np.ones_like(value) for name, value in random_params(config).items()}
    stored = maxtext_params(config, params, scanned=True)
    moments = nested({name: 0 * value for name, value in stored.items()})
    items = write_maxtext(tmp_path / "items", stored, opt_state={"m": moments, "odd": 3})
    result = loaded(items, config)
    assert all((value != 0).all() for value in names_of(result).values())


def test_nothing_there(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    assert "there is no such folder; looked for config.json" in refusal(tmp_path / "none", config)
    assert "nothing in it is a checkpoint" in refusal(tmp_path, config)
    assert "remote paths are not built yet" in refusal("gs://bucket/model", config)


def test_a_damaged_directory(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    path = write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)), shards=3)
    second, third = sorted(path.glob("*.safetensors"))[1:]
    second.unlink()
    third.write_bytes(third.read_bytes()[:-4])
    message = refusal(path, config)
    assert second.name in message
    assert third.name in message
    (path / "model.safetensors.index.json").unlink()
    assert "2 safetensors files, but no" in refusal(path, config)
    (path / "config.json").write_text("[1")
    third.unlink()
    assert "config.json: cannot be read" in refusal(path, config)


def test_an_orbax_tree_of_something_else(tmp_path):
    import orbax.checkpoint as orbax

    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    orbax.PyTreeCheckpointer().save((tmp_path / "items").absolute(), {"params": {"x": jax.numpy.ones(3)}})
    assert "without params/params/token_embedder/embedding" in refusal(tmp_path, config)


def test_a_shape_is_refused_before_values_are_read(tmp_path, monkeypatch):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    path = write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    index = {"weight_map": {"a": "model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    source = open_source(str(path))
    monkeypatch.setattr("trainer.models.huggingface.Layout.to_ours", None)
    shapes = {name: leaf.shape for name, leaf in names_of(abstract_of(config)).items()}
    source.leaves(config, shapes)
    with pytest.raises(UserError):
        source.leaves(config, shapes | {"decoder/decoder_norm/scale": (3,)})


def test_nested_and_back():
    flat = {"a/b/c": 1, "a/d": 2, "e": 3}
    assert nested(flat) == {"a": {"b": {"c": 1}, "d": 2}, "e": 3}
    assert names_of(nested(flat)) == flat
