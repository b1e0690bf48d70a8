"""shard_mapped: each device's part of arrays and of NNX modules, and the same results as without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from trainer.sharding import Axes, on_mesh, shard_mapped

RULES = {"batch": ("data", "fsdp"), "width": ("tensor",), "depth": ()}
ROWS = Axes(("batch", "depth"))


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def test_each_device_sees_its_part(mesh):
    seen = []

    def double(pair, y):
        seen.append((pair["a"].shape, pair["b"].shape, y.shape))
        return {"sum": pair["a"] + pair["b"], "y": y * 2}

    a = jnp.arange(32.0).reshape(8, 4)
    run = shard_mapped(double, (ROWS, Axes(("width",))), {"sum": ROWS, "y": Axes(("width",))})
    plain = run({"a": a, "b": a}, jnp.arange(6.0))
    with on_mesh(mesh, RULES):
        run = shard_mapped(double, (ROWS, Axes(("width",))), {"sum": ROWS, "y": Axes(("width",))})
        out = jax.jit(run)({"a": a, "b": a}, jnp.arange(6.0))
    assert seen == [((8, 4), (8, 4), (6,)), ((2, 4), (2, 4), (3,))]
    for name, value in plain.items():
        np.testing.assert_array_equal(out[name], value)


def test_gradients_equal_those_without_a_mesh(mesh):
    x, weight = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
    weight = weight[:4]

    def loss(x, weight):
        run = shard_mapped(
            lambda x, weight: jnp.tanh(x @ weight), (ROWS, Axes(("depth", "width"))), Axes(("batch", "width"))
        )
        return jnp.sum(run(x, weight) ** 2)

    grad = jax.grad(loss, argnums=(0, 1))
    plain = grad(x, weight)
    with on_mesh(mesh, RULES):
        for actual, expected in zip(jax.jit(grad)(x, weight), plain, strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-5)


class Counter(nnx.Module):
    """A matrix, and what it has seen."""

    def __init__(self):
        kernel = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
        self.kernel = nnx.Param(kernel, out_sharding=("depth", "width"))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32), out_sharding=())
        self.largest = nnx.BatchStat(jnp.zeros(6), out_sharding=("width",))

    def __call__(self, x):
        out = x @ self.kernel[...]
        self.calls[...] += 1
        self.largest[...] = jnp.maximum(self.largest[...], reduce_max(jnp.abs(out).max(axis=0)))
        return out


def reduce_max(x):
    """The maximum over the devices of the batch, where there are such."""
    return jax.lax.pmax(x, ("data", "fsdp")) if jax.sharding.get_abstract_mesh().manual_axes else x


def call(module, x):
    return module(x)


def names_of(module):
    """The module with the logical names of each Variable in its place."""
    return jax.tree.map(lambda v: Axes(v.out_sharding), module, is_leaf=lambda node: isinstance(node, nnx.Variable))


def through(module, x, whole: bool):
    names = Axes(()) if whole else names_of(module)
    return shard_mapped(call, (names, ROWS), Axes(("batch", None if whole else "width")))(module, x)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_a_module_passes_through_and_its_updates_come_out(mesh, whole, jit):
    x = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)

    def twice(module, x):
        through(module, x, whole)
        return through(module, 2 * x, whole), module

    with nnx.set_graph_mode(False), nnx.set_graph_updates(False), nnx.use_eager_sharding(False):
        expected, plain = twice(Counter(), x)
        with on_mesh(mesh, RULES):
            out, module = (jax.jit(twice) if jit else twice)(Counter(), x)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    assert module.calls[...] == plain.calls[...] == 2
    assert (plain.largest[...] > 0).all()
    np.testing.assert_allclose(module.largest[...], plain.largest[...], atol=1e-6)
    np.testing.assert_array_equal(module.kernel[...], plain.kernel[...])


def test_a_value_that_is_not_equal_on_all_devices_is_found(mesh):
    run = lambda check: shard_mapped(lambda x: x.sum(), (ROWS,), Axes(()), check=check)  # noqa: E731
    with on_mesh(mesh, RULES):
        run(False)(jnp.ones((8, 4)))
        with pytest.raises(ValueError, match="out_specs"):
            run(True)(jnp.ones((8, 4)))
