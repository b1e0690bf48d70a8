"""Checkpoints written from leaves that need no source."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from checkpoint_cases import (
    BFLOAT16,
    FAMILIES,
    abstract_of,
    assert_same,
    config_of,
    hf_tensors,
    hf_tensors_of,
    in_pairs,
    random_params,
    read_hf,
    write_hf,
)

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.leaves import orbax
from trainer.leaves.source import Leaf, names_of
from trainer.models.llama2 import family as llama2
from trainer.weights.huggingface.read import HuggingFaceSource
from trainer.weights.huggingface.write import write_huggingface
from trainer.weights.load import load_parameters
from trainer.weights.open import open_source
from trainer.weights.params.write import target_dtype, write_params


def leaves_of(params):
    """Returns leaves: a stacked leaf has one part per layer, any other leaf has one part."""
    return {
        name: Leaf(
            value.shape,
            value.dtype,
            [lambda x=x: x for x in value] if name.startswith("decoder/layers/") else [lambda value=value: value],
        )
        for name, value in params.items()
    }


def read(path, config, dtype=np.float32):
    return load_parameters(str(path), config, abstract_of(config, dtype), print)


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("block", FAMILIES)
def test_hugging_face(tmp_path, block, interleave):
    config = config_of(decoder_block=block, **FAMILIES[block], rope_interleave=interleave)
    params = random_params(config, BFLOAT16)
    write_huggingface(tmp_path, config, leaves_of(in_pairs(params) if interleave else params), None)
    assert_same(read_hf(tmp_path), hf_tensors_of(config, params))
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_shards_hold_whole_layers_and_their_index_names_every_tensor(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    params = random_params(config)
    write_huggingface(tmp_path, config, leaves_of(params), None, shard_bytes=10_000)
    wanted = hf_tensors(params)
    assert_same(read_hf(tmp_path), wanted)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    assert len(set(index["weight_map"].values())) > 1
    for file in tmp_path.glob("*.safetensors"):
        assert file.stat().st_size < 10_000 + 2_000  # the header
    assert_same(read(tmp_path, config), params)
    numbers = [index["weight_map"][f"model.layers.{i}.input_layernorm.weight"] for i in range(2)]
    assert numbers == sorted(numbers)


def test_a_cast_touches_floating_point_only():
    assert target_dtype(np.dtype(np.float32), "bfloat16") == BFLOAT16
    assert target_dtype(BFLOAT16, "float32") == np.float32
    assert target_dtype(BFLOAT16, None) == BFLOAT16
    assert target_dtype(np.dtype(np.int32), "bfloat16") == np.int32


def test_integers_are_written_as_they_are(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    values = np.arange(-3, 3, dtype=np.int32) * 2**28 + 1  # values that bfloat16 cannot represent
    odd = {"odd": values, "even": values.astype(np.float32)}
    write_params(tmp_path, config, leaves_of(odd), "bfloat16")
    tree = tmp_path / "checkpoint"
    headers = orbax.headers(tree)
    assert {name: np.dtype(it.dtype) for name, it in headers.items()} == {
        "params/odd": np.int32,
        "params/even": BFLOAT16,
    }
    assert orbax.Tree(tree, headers).read("params/odd").tobytes() == values.tobytes()


@pytest.mark.parametrize("write", [write_huggingface, write_params])
def test_layers_in_several_dtypes_are_refused_by_name_or_cast(tmp_path, write):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    params = random_params(config)
    tensors = hf_tensors(params)
    for name, dtype in (("mlp.up_proj", BFLOAT16), ("self_attn.o_proj", np.float16)):
        name = f"model.layers.0.{name}.weight"
        tensors[name] = tensors[name].astype(dtype)
    source = open_source(str(write_hf(tmp_path / "hf", config, tensors)))
    leaves = source.leaves(config, {name: value.shape for name, value in params.items()})
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"(?s)dtype=float32.*wi_1/kernel: bfloat16, float32.*out/kernel: float16, f"):
        write(tmp_path / "out", config, leaves, None)
    write(tmp_path / "out", config, leaves, "float32")
    wanted = names_of(read(tmp_path / "hf", config))
    assert_same(read(tmp_path / "out", config), {name: np.asarray(value) for name, value in wanted.items()})


def test_parameters_alone(tmp_path):
    config = config_of(decoder_block="qwen3", **FAMILIES["qwen3"])
    params = random_params(config, BFLOAT16)
    write_params(tmp_path, config, leaves_of(params), None)
    (tmp_path / "huggingface.json").write_text('{"eos_token_id": 7}')
    assert_same(read(tmp_path, config, BFLOAT16), params)
    assert_same(read(tmp_path, config), {name: value.astype(np.float32) for name, value in params.items()})
    source = open_source(str(tmp_path))
    assert source.about.fields == {"eos_token_id": 7}
    # The checkpoint contains only parameters: no step, no optimizer.
    headers = source._headers
    assert {name.removeprefix("params/") for name in headers} == params.keys()
    # config.yml defines the model by itself, and leaves data and mesh open.
    again = load([str(tmp_path / "config.yml"), "dataset_type=synthetic"]).config
    assert (again.decoder_block, again.vocab_size, again.ici_fsdp_parallelism) == ("qwen3", config.vocab_size, -1)


@pytest.mark.parametrize("written", [False, True])
def test_the_order_of_a_heads_entries_is_converted(tmp_path, written):
    halves = random_params(config_of(decoder_block="qwen3", **FAMILIES["qwen3"]))
    orders = {order: in_pairs(halves) if order else halves for order in (False, True)}
    configs = {
        order: config_of(decoder_block="qwen3", **FAMILIES["qwen3"], rope_interleave=order) for order in (False, True)
    }
    write_params(tmp_path, configs[written], leaves_of(orders[written]), None)
    for order in (False, True):
        assert_same(read(tmp_path, configs[order]), orders[order])


def test_without_layouts_the_order_cannot_be_converted(tmp_path, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "mine", SimpleNamespace(family=dataclasses.replace(llama2.FAMILY, hugging_face=()))
    )
    configs = [config_of(decoder_block="mine:family", **FAMILIES["llama2"], rope_interleave=it) for it in (False, True)]
    params = random_params(configs[0])
    write_params(tmp_path, configs[0], leaves_of(params), None)
    assert_same(read(tmp_path, configs[0]), params)
    message = "saved with rope_interleave=False, but rope_interleave=True is given: .*mine:family declares no Layouts"
    with pytest.raises(UserError, match=message):
        read(tmp_path, configs[1])


def test_a_family_that_is_always_tied_needs_no_layout_of_a_head(tmp_path, monkeypatch):
    layouts = {name: layout for name, layout in llama2.LAYOUTS.items() if "logits_dense" not in name}
    tables = llama2.FAMILY.hugging_face[0]._replace(layouts=layouts)
    own = SimpleNamespace(family=dataclasses.replace(llama2.FAMILY, hugging_face=[tables]))
    monkeypatch.setitem(sys.modules, "mine", own)
    config = config_of(
        decoder_block="mine:family",
        **FAMILIES["llama2"] | {"logits_via_embedding": True, "normalize_embedding_logits": False},
    )
    params = random_params(config)
    write_huggingface(tmp_path, config, leaves_of(params), None)
    leaves = HuggingFaceSource(tmp_path, "mine:family").leaves(config, {name: it.shape for name, it in params.items()})
    assert leaves.keys() == params.keys()


def test_tensors_that_do_not_fit_are_all_named(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    params = random_params(config)
    params["decoder/decoder_norm/scale"] = np.ones((3, 2), np.float32)
    del params["decoder/layers/mlp/wo/kernel"]
    write_params(tmp_path, config, leaves_of(params | {"odd": np.ones(4, np.float32)}), None)
    with pytest.raises(UserError, match=r"(?s)3 tensors.*scale: found \[3, 2\].*wo/kernel: missing.*odd: the model"):
        read(tmp_path, config)


def test_another_model_is_refused(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    write_params(tmp_path, config, leaves_of(random_params(config)), None)
    other = config_of(decoder_block="llama2", **FAMILIES["llama2"], rope_max_timescale=7)
    with pytest.raises(UserError, match=r"contains a different model.*give: rope_max_timescale=10000$"):
        read(tmp_path, other)


def test_a_key_that_the_user_gives_may_say_another_function(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    params = random_params(config)
    write_params(tmp_path, config, leaves_of(params), None)
    other = config_of(decoder_block="llama2", **FAMILIES["llama2"], rope_max_timescale=7)
    lines = []
    given = {"rope_max_timescale"}
    result = load_parameters(str(tmp_path), other, abstract_of(other, "float32"), lines.append, given)
    assert_same(names_of(result), params)
    assert lines == [f"{tmp_path} has rope_max_timescale=10000; rope_max_timescale=7 was given and takes precedence"]


def test_parameters_alone_load_sharded(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    params = random_params(config)
    write_params(tmp_path, config, leaves_of(params), None)
    mesh = jax.make_mesh((4,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=split if leaf.shape[0] % 4 == 0 else sharding
        ),
        abstract_of(config),
    )
    result = load_parameters(str(tmp_path), config, abstract, print)
    assert_same(result, params)
    assert result["token_embedder"]["embedding"].sharding == split
