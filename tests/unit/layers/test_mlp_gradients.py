"""The backward pass of the feed-forward layer, which is written out, against what autodiff makes of the forward one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.layers import mlp
from trainer.layers.mlp import MLP
from trainer.sharding import on_mesh

RULES = {
    "activation_batch": ("data", "fsdp"),
    "activation_length": (),
    "activation_norm_length": ("tensor",),
    "activation_embed": (),
    "activation_mlp": ("tensor",),
    "embed": ("fsdp",),
    "mlp": ("tensor",),
}
ACTIVATIONS = [["gelu"], ["silu", "linear"], ["gelu", "linear", "sigmoid"]]


def loss_of(activations, dtype=jnp.float32, rate=0.0):
    """The sum of squares of a layer's output as a function of its parameters and input, and those."""
    layer = MLP(8, 12, activations, dropout_rate=rate, dtype=dtype, weight_dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 8)), dtype)

    def loss(params, x):
        out = nnx.merge(graph, params)(x, jnp.arange(8), jax.random.key(1))
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return loss, params, x


def with_autodiff(monkeypatch):
    """Autodiff of the forward pass in place of the backward pass that is written out."""
    monkeypatch.setattr(mlp, "_mlp", lambda *args: mlp._mlp_forward(*args)[0])


@pytest.mark.parametrize("activations", ACTIVATIONS, ids="-".join)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_gradients_are_the_bits_of_autodiff(activations, dtype, rate, monkeypatch):
    loss, params, x = loss_of(activations, jnp.dtype(dtype), rate)
    found = jax.grad(loss, argnums=(0, 1))(params, x)
    with_autodiff(monkeypatch)
    expected = jax.grad(loss, argnums=(0, 1))(params, x)
    for a, b in zip(jax.tree.leaves(expected[0]), jax.tree.leaves(found[0]), strict=True):
        assert (a.dtype, b.dtype) == (jnp.float32, jnp.float32)
        np.testing.assert_array_equal(b, a)
    assert found[1].dtype == x.dtype
    x_bar, expected_x_bar = (np.asarray(bars[1], np.float64) for bars in (found, expected))
    # Of three addends autodiff begins with the last.
    last_bits = 0 if len(activations) < 3 else float(jnp.finfo(dtype).eps) * np.abs(expected_x_bar).max()
    np.testing.assert_allclose(x_bar, expected_x_bar, rtol=0, atol=last_bits)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_gradients_on_a_mesh_are_those_of_autodiff_off_it(rate, monkeypatch):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)
    loss, params, x = loss_of(["silu", "linear"], rate=rate)
    with on_mesh(mesh, RULES):
        program = jax.jit(jax.grad(loss, argnums=(0, 1)))
        found, text = program(params, x), str(jax.make_jaxpr(program)(params, x))
    # The hidden units' gradient too is placed: after the two projections.
    placed = NamedSharding(mesh, P(("data", "fsdp"), None, "tensor"))
    assert text.count(f"spec={placed.spec}") == 3, text
    with_autodiff(monkeypatch)
    loss, params, x = loss_of(["silu", "linear"], rate=rate)
    expected = jax.grad(loss, argnums=(0, 1))(params, x)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)  # sums in another order
    for name, spec in (("wi_0", P("fsdp", "tensor")), ("wi_1", P("fsdp", "tensor")), ("wo", P("tensor", "fsdp"))):
        at = NamedSharding(mesh, spec)
        assert found[0][name]["kernel"][...].sharding.is_equivalent_to(at, 2)


def test_nothing_is_made_before_its_turn():
    """Which barriers the operands of each product have passed: forward none, then one more for each gradient."""
    loss, params, x = loss_of(["silu", "linear"])
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, x).jaxpr
    passed, products, barriers = {}, [], 0
    for equation in jaxpr.eqns:
        behind = set().union(*(passed.get(v, set()) for v in equation.invars if not hasattr(v, "val")))
        if equation.primitive.name == "optimization_barrier":
            behind, barriers = behind | {barriers}, barriers + 1
        products += [behind] * str(equation).count("dot_general[")
        passed |= dict.fromkeys(equation.outvars, behind)
    first, second, third = {0}, {0, 1}, {0, 1, 2}
    # Two projections, out; wo's gradient; the hidden units' and twice the input's; wi_0's; wi_1's.
    assert products == [set(), set(), set(), set(), first, first, first, second, third]
    # Nothing goes on from the input's gradient, the last result, before the last of the matrices'.
    assert passed[jaxpr.outvars[-1]] == {0, 1, 2, 3}
