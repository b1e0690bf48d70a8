"""Layers reach all their matrices through the product that they are given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainer.layers.attention import Attention
from trainer.layers.context import Context
from trainer.layers.dense import Embed
from trainer.layers.mlp import MLP
from trainer.ops.rope import Rope
from trainer.products import plain, product

DTYPES = {"dtype": jnp.float32, "weight_dtype": jnp.float32}
B, T, E = 2, 3, 8
NAMES = {
    "attention": {("embed", "q_heads", "kv"), ("embed", "kv_heads", "kv_head_dim"), ("heads", "kv", "embed")},
    "mlp": {("embed", "mlp"), ("mlp", "embed")},
    "embed": {("embed", "vocab")},  # as the head multiplies by the table
}


class Recorded:
    """A product that makes every kernel one of integers, and notes which it met."""

    def __init__(self):
        self.met = []

    def __call__(self, in_shape, out_shape, names, *, rngs):
        def rounded(x, inputs, kernel):
            self.met.append((tuple(names), (*in_shape, *out_shape) == kernel.shape))
            return product(x, inputs, jnp.round(4 * kernel))

        return rounded


class Adapter(nnx.Module):
    """A low-rank term of its own beside a plain product; it starts as nothing."""

    def __init__(self, in_shape, out_shape, names, *, rngs):
        self.down = nnx.Param(jax.random.normal(rngs.params(), (*in_shape, 2)))
        self.up = nnx.Param(jnp.zeros((2, *out_shape)))

    def __call__(self, x, inputs, kernel):
        return product(x, inputs, kernel) + product(product(x, inputs, self.down[...]), 1, self.up[...])


def layers(make_product):
    """Name -> (layer, its call) of every layer with matrices."""
    rngs = nnx.Rngs(0)
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 4, "rope": Rope(1, 10_000)}
    attention = Attention(E, **heads, **DTYPES, make_product=make_product, rngs=rngs)
    mlp = MLP(E, 12, ["silu", "linear"], dropout_rate=0.0, **DTYPES, make_product=make_product, rngs=rngs)
    embed = Embed(16, E, **DTYPES, make_product=make_product, rngs=rngs)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, E)), jnp.float32)
    position, segment = jnp.broadcast_to(jnp.arange(T), (B, T)), jnp.ones((B, T), jnp.int32)
    return {
        "attention": (attention, lambda m: m(x, None, Context(position, segment, jnp.arange(B), None))[0]),
        "mlp": (mlp, lambda m: m(x, jnp.arange(B), None)),
        "embed": (embed, lambda m: m.attend(x)),
    }


@pytest.mark.parametrize("name", ["attention", "mlp", "embed"])
def test_another_product_is_used_for_every_matrix(name):
    make = Recorded()
    layer, call = layers(make)[name]
    out = call(layer)
    matrices = [v for v in jax.tree.leaves(nnx.to_pure_dict(nnx.state(layer, nnx.Param))) if v.ndim > 1]
    assert len(make.met) == len(matrices)
    assert all(fits for _, fits in make.met)
    assert {names for names, _ in make.met} == NAMES[name]
    layer, call = layers(plain)[name]
    rounded = jax.tree.map(lambda v: jnp.round(4 * v), nnx.state(layer, nnx.Param))
    nnx.update(layer, rounded)
    np.testing.assert_array_equal(out, call(layer))


@pytest.mark.parametrize("name", ["attention", "mlp", "embed"])
def test_a_product_with_parameters_brings_them_into_the_model(name):
    layer, call = layers(Adapter)[name]
    base, base_call = layers(plain)[name]
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

    grads = nnx.to_flat_state(jax.grad(loss)(nnx.state(layer, nnx.Param)))
    assert all(jnp.any(leaf[...] != 0) for path, leaf in grads if path[-1] == "up")
