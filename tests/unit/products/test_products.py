"""Layers compute the products with all their matrices through the product object that they receive."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainer.config.capabilities.invariant_keys import COLUMNS
from trainer.config.errors import UserError
from trainer.layers.attention import Attention
from trainer.layers.dense import Embed
from trainer.layers.matrices import choose_products
from trainer.layers.mlp import MLP
from trainer.layers.moe import MoE
from trainer.ops.rope import Rope
from trainer.ops.routing import softmax_of_chosen
from trainer.products.context import Context
from trainer.products.plain import Kernel, grouped_product, make_wide, product

DTYPES = {"dtype": jnp.float32, "weight_dtype": jnp.float32}
B, T, E = 2, 3, 8
NAMES = {
    "attention": {("embed", "q_heads", "kv"), ("embed", "kv_heads", "kv_head_dim"), ("heads", "kv", "embed")},
    "mlp": {("embed", "mlp"), ("mlp", "embed")},
    "embed": {("embed", "vocab")},  # a tied head multiplies with the table
}


class Recorded:
    """A product that replaces every kernel by integers and records the kernels that it receives."""

    def __init__(self):
        self.met = []

    def __call__(self, kernel, *, rngs):
        def rounded(x, inputs, value, reduce_early, context):
            self.met.append((kernel.names, (*kernel.in_shape, *kernel.out_shape) == value.shape))
            return product(x, inputs, jnp.round(4 * value), reduce_early)

        return rounded


class Adapter(nnx.Module):
    """Adds a low-rank term to a plain product. The term is initially zero."""

    def __init__(self, kernel, *, rngs):
        self.down = nnx.Param(jax.random.normal(rngs.params(), (*kernel.in_shape, 2)))
        self.up = nnx.Param(jnp.zeros((2, *kernel.out_shape)))

    def __call__(self, x, inputs, kernel, reduce_early, context):
        return product(x, inputs, kernel, reduce_early) + product(product(x, inputs, self.down[...]), 1, self.up[...])


def layer_of(name, make_product=None):
    """Returns a layer with matrices, and a function that calls it."""
    rngs = nnx.Rngs(0)
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 4, "rope": Rope(1, 10_000)}
    how = {"rngs": rngs, **DTYPES}
    x = np.random.default_rng(0).normal(size=(B, T, E)).astype(np.float32)
    position, segment = np.broadcast_to(np.arange(T), (B, T)), np.ones((B, T), np.int32)
    context = Context(position, segment, np.arange(B), None)
    layers = {
        "attention": (lambda: Attention(E, **heads, **how), lambda m: m(x, None, context)[0]),
        "mlp": (lambda: MLP(E, 12, ["silu", "linear"], dropout_rate=0.0, **how), lambda m: m(x, context)),
        "embed": (lambda: Embed(16, E, **how), lambda m: m.attend(x)),
    }
    make, call = layers[name]
    layer = choose_products(make(), "", [("", make_product)] if make_product else [], rngs)

    def called(layer):
        graph, state = nnx.split(layer)
        return jax.jit(lambda state: call(nnx.merge(graph, state)))(state)

    return layer, called


@pytest.mark.parametrize("name", ["attention", "mlp", "embed"])
def test_another_product_is_used_for_every_matrix(name):
    make = Recorded()
    layer, call = layer_of(name, make)
    out = call(layer)
    matrices = [v for v in jax.tree.leaves(nnx.to_pure_dict(nnx.state(layer, nnx.Param))) if v.ndim > 1]
    assert len(make.met) == len(matrices)
    assert all(fits for _, fits in make.met)
    assert {names for names, _ in make.met} == NAMES[name]
    layer, call = layer_of(name)
    rounded = jax.tree.map(lambda v: np.round(4 * np.asarray(v)), nnx.state(layer, nnx.Param))
    nnx.update(layer, rounded)
    np.testing.assert_array_equal(out, call(layer))


@pytest.mark.parametrize("name", ["attention", "mlp", "embed"])
def test_a_product_with_parameters_brings_them_into_the_model(name):
    layer, call = layer_of(name, Adapter)
    base, base_call = layer_of(name)
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
    assert all(np.any(np.asarray(leaf[...]) != 0) for path, leaf in grads if path[-1] == "up")


def test_the_embedding_table_must_be_an_array():
    table = Embed(16, E, **DTYPES, rngs=nnx.Rngs(0))
    table.embedding = nnx.Param({"q": jnp.ones((16, E), jnp.int8), "scale": jnp.ones(())})
    with pytest.raises(
        UserError, match="token_embedder/embedding is stored as dict, but rows can only be looked up in an array"
    ):
        table(jnp.zeros((B, T), jnp.int32))


def test_experts_reach_their_matrices_through_the_products_that_are_chosen():
    met = set()

    def make_grouped(kernel, *, rngs):
        def noted(x, value, sizes, context):
            whole = (kernel.groups, *kernel.in_shape, *kernel.out_shape) == value.shape
            met.add((kernel.names, whole, sizes is not None))
            return grouped_product(x, value, sizes)

        return noted

    recorded, ids = Recorded(), jnp.ones((B, T), jnp.int32)
    how = {"experts": 3, "chosen": 2, "score": softmax_of_chosen, "capacity_factor": -1.0, **DTYPES}
    for sparse in (True, False):
        layer = MoE(E, 5, ("silu", "linear"), sparse=sparse, **how, rngs=nnx.Rngs(0))
        choose_products(layer, "", [("^gate/kernel$", recorded), ("^w", make_grouped)], nnx.Rngs(0))
        jax.eval_shape(layer, jnp.ones((B, T, E)), Context(ids, ids, rows=ids[:, 0], key=None))
    assert recorded.met == [(("embed_moe", "exp"), True)] * 2
    names = {("exp", "embed_moe", "mlp"), ("exp", "mlp", "embed_moe")}
    assert met == {(axes, True, sparse) for axes in names for sparse in (True, False)}


@pytest.mark.parametrize("kernel", [Kernel((3, 2), (1, 4), ()), Kernel((6,), (5,), (), groups=2)])
def test_a_wide_product_multiplies_with_more_columns(kernel):
    """Its values and gradients equal those of the plain product."""
    rngs, groups = nnx.Rngs(0), (kernel.groups,) * bool(kernel.groups)
    wide, plain = make_wide(kernel, rngs=rngs), grouped_product if groups else product
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, *(() if groups else (7,)), *kernel.in_shape)).astype(np.float32)
    weights = rng.normal(size=(*groups, *kernel.in_shape, *kernel.out_shape)).astype(np.float32)
    how = (np.array([1, 3]),) if groups else ()
    given = (lambda of: lambda x, w: of(x, w, *how)) if groups else (lambda of: lambda x, w: of(x, 2, w))

    def both_ways(of, x, weights):
        out, pull = jax.vjp(given(of), x, weights)
        return out, *pull(out)

    found, expected = (jax.jit(both_ways, static_argnums=0)(of, x, weights) for of in (wide, plain))
    assert found[0].shape == expected[0].shape
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    widths = re.findall(r"(\d+)\] = (?:ragged_)?dot_general", str(jax.make_jaxpr(given(wide))(x, weights)))
    assert widths == [str(COLUMNS)]
    assert make_wide(kernel._replace(out_shape=(COLUMNS,)), rngs=rngs) is plain
