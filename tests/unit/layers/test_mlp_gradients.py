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
    "activation_norm_length": (),
    "activation_embed": (),
    "activation_mlp": ("tensor",),
    "embed": ("fsdp",),
    "mlp": ("tensor",),
}
ACTIVATIONS = [["gelu"], ["silu", "linear"], ["gelu", "linear", "sigmoid"]]


def loss_of(activations, dtype, rate):
    """The sum of squares of a layer's output as a function of its parameters and input, and those."""
    layer = MLP(8, 12, activations, dropout_rate=rate, dtype=dtype, weight_dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3, 8)), dtype)

    def loss(params, x):
        out = nnx.merge(graph, params)(x, jnp.arange(8), jax.random.key(1))
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return loss, params, x


@pytest.mark.parametrize("activations", ACTIVATIONS, ids="-".join)
@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("meshed", [False, True])
def test_gradients_are_those_of_autodiff(activations, rate, meshed, monkeypatch):
    loss, params, x = loss_of(activations, jnp.float32, rate)
    monkeypatch.setattr(mlp, "_mlp", lambda *args: mlp._mlp_forward(*args)[0])
    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    monkeypatch.undo()
    loss, params, x = loss_of(activations, jnp.float32, rate)
    if meshed:
        mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)
        with on_mesh(mesh, RULES):
            found = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
        wo = found[0]["wo"]["kernel"][...]
        assert wo.sharding.is_equivalent_to(NamedSharding(mesh, P("tensor", "fsdp")), 2)
    else:
        found = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)  # sums in another order


def test_gradients_equal_finite_differences():
    loss, params, x = loss_of(["silu", "linear"], jnp.float32, 0.0)
    gradient = jax.grad(loss)(params, x)
    step = 3e-3
    for seed, name in enumerate(["wi_0", "wi_1", "wo"]):
        kernel = params[name]["kernel"][...]
        direction = jnp.asarray(np.random.default_rng(seed).normal(size=kernel.shape), jnp.float32)

        def along(distance, name=name, kernel=kernel, direction=direction):
            moved = jax.tree.map(lambda leaf: leaf, params)
            moved[name]["kernel"][...] = kernel + distance * direction
            return float(loss(moved, x))

        slope = (along(step) - along(-step)) / (2 * step)
        np.testing.assert_allclose(jnp.vdot(gradient[name]["kernel"][...], direction), slope, rtol=2e-3)


def test_parameters_and_input_get_gradients_in_their_own_dtypes():
    loss, params, x = loss_of(["silu", "linear"], jnp.bfloat16, 0.0)
    params_bar, x_bar = jax.grad(loss, argnums=(0, 1))(params, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(params_bar)} == {jnp.dtype("float32")}
    assert x_bar.dtype == jnp.bfloat16


def test_nothing_is_held_for_what_comes_later():
    """Products between the barriers: three forward and wo's gradient, the hidden units' and the input's, each wi's."""
    loss, params, x = loss_of(["silu", "linear"], jnp.float32, 0.0)
    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, x))
    assert [part.count("dot_general") for part in text.split("optimization_barrier")] == [4, 3, 1, 1, 0]
