"""Layers multiply with all their matrices through the product that they are given."""

import functools
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import ALL_COMBINATIONS, assert_equal_bits, compiled, packed_batch, tiny_config

from trainer.backends import make_model
from trainer.config import UserError
from trainer.layers.attention import Attention
from trainer.layers.context import Context
from trainer.layers.dense import Embed
from trainer.layers.mlp import MLP
from trainer.layers.moe import MoE
from trainer.layers.sown import MtpHidden
from trainer.layers.stack import Stack
from trainer.models import llama2
from trainer.models.family import Family
from trainer.objectives import make_objective
from trainer.ops.random import seed_key
from trainer.ops.rope import Rope
from trainer.ops.routing import softmax_of_chosen
from trainer.products import grouped_product, plain, product

DTYPES = {"dtype": jnp.float32, "weight_dtype": jnp.float32}
B, T, E = 2, 3, 8
NAMES = {
    "attention": {("embed", "q_heads", "kv"), ("embed", "kv_heads", "kv_head_dim"), ("heads", "kv", "embed")},
    "mlp": {("embed", "mlp"), ("mlp", "embed")},
    "embed": {("embed", "vocab")},  # the head multiplies with the table
}


class Recorded:
    """A product that replaces every kernel by integers and records which kernels it gets."""

    def __init__(self):
        self.met = []

    def __call__(self, in_shape, out_shape, names, *, rngs):
        def rounded(x, inputs, kernel, reduce_early):
            self.met.append((tuple(names), (*in_shape, *out_shape) == kernel.shape))
            return product(x, inputs, jnp.round(4 * kernel), reduce_early)

        return rounded


class Adapter(nnx.Module):
    """A low-rank term in addition to a plain product. It starts as zero."""

    def __init__(self, in_shape, out_shape, names, *, rngs):
        self.down = nnx.Param(jax.random.normal(rngs.params(), (*in_shape, 2)))
        self.up = nnx.Param(jnp.zeros((2, *out_shape)))

    def __call__(self, x, inputs, kernel, reduce_early):
        return product(x, inputs, kernel, reduce_early) + product(product(x, inputs, self.down[...]), 1, self.up[...])


def layer_of(name, make_product):
    """Returns a layer with matrices, and its call."""
    rngs = nnx.Rngs(0)
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 4, "rope": Rope(1, 10_000)}
    how = {"make_product": make_product, "rngs": rngs, **DTYPES}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, E)), jnp.float32)
    position, segment = jnp.broadcast_to(jnp.arange(T), (B, T)), jnp.ones((B, T), jnp.int32)
    if name == "attention":
        context = Context(position, segment, jnp.arange(B), None)
        return Attention(E, **heads, **how), lambda m: m(x, None, context)[0]
    if name == "mlp":
        return MLP(E, 12, ["silu", "linear"], dropout_rate=0.0, **how), lambda m: m(x, jnp.arange(B), None)
    return Embed(16, E, **how), lambda m: m.attend(x)


@pytest.mark.parametrize("name", ["attention", "mlp", "embed"])
def test_another_product_is_used_for_every_matrix(name):
    make = Recorded()
    layer, call = layer_of(name, make)
    out = call(layer)
    matrices = [v for v in jax.tree.leaves(nnx.to_pure_dict(nnx.state(layer, nnx.Param))) if v.ndim > 1]
    assert len(make.met) == len(matrices)
    assert all(fits for _, fits in make.met)
    assert {names for names, _ in make.met} == NAMES[name]
    layer, call = layer_of(name, plain)
    rounded = jax.tree.map(lambda v: jnp.round(4 * v), nnx.state(layer, nnx.Param))
    nnx.update(layer, rounded)
    np.testing.assert_array_equal(out, call(layer))


@pytest.mark.parametrize("name", ["attention", "mlp", "embed"])
def test_a_product_with_parameters_brings_them_into_the_model(name):
    layer, call = layer_of(name, Adapter)
    base, base_call = layer_of(name, plain)
    params = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    kernels = {path for path, _ in params if "product" not in path}
    own = {path[:-2] for path, _ in params if "product" in path}
    assert own == {path[:-1] for path in kernels}
    nnx.update(base, nnx.from_flat_state([(path, leaf) for path, leaf in params if "product" not in path]))
    np.testing.assert_array_equal(call(layer), base_call(base))

    def loss(params):
        model = nnx.clone(layer)
        nnx.update(model, params)
        return jnp.sum(call(model) ** 2)

    grads = nnx.to_flat_state(jax.jit(jax.grad(loss))(nnx.state(layer, nnx.Param)))
    assert all(jnp.any(leaf[...] != 0) for path, leaf in grads if path[-1] == "up")


class Int8(NamedTuple):
    """A quantized matrix: value x scale."""

    value: Any
    scale: Any


def quantized(in_shape, out_shape, names, *, rngs):
    """Returns a product with an `Int8`. It multiplies by the scale, one per layer, afterwards."""

    def multiply(x, inputs, kernel, reduce_early):
        if not isinstance(kernel, Int8):  # initial parameters
            return product(x, inputs, kernel, reduce_early)
        return product(x, inputs, kernel.value) * kernel.scale.astype(x.dtype)

    return multiply


def int8(path, leaf):
    """Quantizes kernels by a power of two, so that the product with value x scale has the same bits. Returns other
    leaves unchanged."""
    if path[-1].key != "kernel":
        return leaf
    axes = tuple(range(1, leaf.ndim)) if "layers" in str(path) else None
    scale = np.exp2(np.ceil(np.log2(np.abs(leaf).max(axes) / 127))).astype(np.float32)
    return Int8(np.round(leaf / np.reshape(scale, scale.shape + (1,) * len(axes or ()))).astype(np.int8), scale)


def plain_again(leaf):
    if not isinstance(leaf, Int8):
        return leaf
    return leaf.value.astype(np.float32) * leaf.scale.reshape(
        leaf.scale.shape + (1,) * (leaf.value.ndim - leaf.scale.ndim)
    )


@pytest.fixture
def quantized_family(monkeypatch):
    block = functools.partial(llama2.Block, make_product=quantized)
    family = Family(lambda config: [Stack("layers", (block,), config.base_num_decoder_layers)], make_product=quantized)
    monkeypatch.setitem(sys.modules, "int8_family", SimpleNamespace(family=family))
    return "int8_family:family"


def of_model(combination, **keys):
    """Returns the model, and logits and hidden states of a module of multi-token prediction as functions of
    parameters."""
    config = tiny_config(combination, mtp_num_layers=1, **keys)
    model, batch = make_model(config), packed_batch(config, 2)

    def logits(params):
        inputs = [batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]
        hidden, sown, _ = model.apply(params, {}, *inputs, capture=(MtpHidden,))
        return model.apply(params, {}, hidden, method="head")[0], sown

    return config, model, logits


def test_a_model_of_int8_matrices_in_every_combination(quantized_family):
    """Every matrix is quantized except the embedding table, which is looked up."""
    untied = {"logits_via_embedding": False}
    _, model, plain_logits = of_model(ALL_COMBINATIONS[0], **untied)
    params = jax.device_get(compiled(model.init, seed_key(0))(seed_key(0))[0])
    small = jax.tree_util.tree_map_with_path(int8, params)
    matrices = [leaf for leaf in jax.tree.leaves(small) if leaf.dtype == np.int8]
    assert len(matrices) == 7 + 1 + 7 + 1  # in the stack, the head, the module's block and its projection
    texts = set()
    for combination in ALL_COMBINATIONS:
        _, _, logits = of_model(combination, decoder_block=quantized_family, **untied)
        lowered = jax.jit(logits).lower(small)
        texts.add(lowered.as_text())
    assert len(texts) == 1
    again = jax.tree.map(plain_again, small, is_leaf=lambda leaf: isinstance(leaf, Int8))
    assert_equal_bits(lowered.compile()(small), jax.jit(plain_logits)(again))


def test_where_a_matrix_must_be_an_array(quantized_family):
    def quantize(params, *path):
        *above, last = path
        held = functools.reduce(lambda tree, name: tree[name], above, params)
        held[last] = Int8(held[last].astype(jnp.int8), jnp.ones(()))
        return params

    config, model, logits = of_model("nnx", decoder_block=quantized_family)
    params, _ = model.abstract
    with pytest.raises(
        UserError, match="token_embedder/embedding is stored as Int8, but rows can only be looked up in an array"
    ):
        jax.eval_shape(lambda params: logits(quantize(params, "token_embedder", "embedding")), params)

    config, model, _ = of_model("nnx", decoder_block=quantized_family, logits_via_embedding=False, num_vocab_tiling=2)
    params, _ = model.abstract
    objective, batch = make_objective(config, model), packed_batch(config, 4)
    with pytest.raises(UserError, match="num_vocab_tiling=2: decoder/logits_dense/kernel is stored as Int8"):
        jax.eval_shape(
            lambda params: (
                objective.sums(quantize(params, "decoder", "logits_dense", "kernel"), {}, batch, None).minimized
            ),
            params,
        )


def test_experts_reach_their_matrices_through_the_product_that_they_are_given():
    met = set()

    def make_grouped(groups, in_size, out_size, names):
        def noted(x, kernel, sizes):
            met.add((tuple(names), kernel.shape == (groups, in_size, out_size), sizes is not None))
            return grouped_product(x, kernel, sizes)

        return noted

    recorded, ids = Recorded(), jnp.ones((B, T), jnp.int32)
    how = {"experts": 3, "chosen": 2, "score": softmax_of_chosen, "capacity_factor": -1.0, **DTYPES}
    how |= {"make_product": recorded, "make_grouped": make_grouped}
    for sparse in (True, False):
        layer = MoE(E, 5, ("silu", "linear"), sparse=sparse, **how, rngs=nnx.Rngs(0))
        jax.eval_shape(layer, jnp.ones((B, T, E)), Context(ids, ids, rows=ids[:, 0], key=None))
    assert recorded.met == [(("embed_moe", "exp"), True)] * 2
    names = {("exp", "embed_moe", "mlp"), ("exp", "mlp", "embed_moe")}
    assert met == {(axes, True, sparse) for axes in names for sparse in (True, False)}
