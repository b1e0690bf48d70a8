"""shard_mapped on arrays and NNX modules: each device computes its part, with the same results as without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from trainer.sharding import Axes, constrain, mesh_axes, on_mesh, reduce_gradient_early, shard_mapped, take

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

    a = np.arange(32, dtype=np.float32).reshape(8, 4)
    run = shard_mapped(double, (ROWS, Axes(("width",))), {"sum": ROWS, "y": Axes(("width",))})
    plain = jax.jit(run)({"a": a, "b": a}, jnp.arange(6.0))
    with on_mesh(mesh, RULES):
        run = shard_mapped(double, (ROWS, Axes(("width",))), {"sum": ROWS, "y": Axes(("width",))})
        out = jax.jit(run)({"a": a, "b": a}, jnp.arange(6.0))
    assert seen == [((8, 4), (8, 4), (6,)), ((2, 4), (2, 4), (3,))]
    for name, value in plain.items():
        np.testing.assert_array_equal(out[name], value)


@pytest.mark.parametrize("over", [None, ("batch",), ("batch", "width"), ("width",), ("depth",)])
def test_a_collective_by_a_logical_name_is_right_over_any_axes(mesh, over):
    """Without a mesh, or if the axis is not manual, the sum is over no axes. Sharding helpers work inside."""
    shapes = []

    def shares(x, table):
        shapes.append((x.shape, table.shape, mesh_axes("batch"), mesh_axes("depth")))
        x = constrain(x @ table, ("batch", "width"))
        return x / jax.lax.psum(x.sum(axis=0), mesh_axes("batch"))

    def looked_up(x, table):
        x, table = reduce_gradient_early(x, table, ("depth", "width"))
        return shares(take(x, jnp.arange(x.shape[0]), ("batch", "depth")), table)

    def run(x, table, fn=shares):
        names = ROWS, Axes(("depth", "width"))
        return shard_mapped(fn, names, Axes(("batch", "width")), over=over)(x, table)

    def results(x, table):
        gradient = jax.grad(lambda table: run(x, table)[0, 0])(table)
        return run(x, table), gradient, run(x, table, fn=looked_up)

    x, table = (np.arange(a * b, dtype=np.float32).reshape(a, b) % (b + 1) for a, b in ((8, 4), (4, 6)))
    expected, expected_gradient, _ = jax.jit(results)(x, table)
    assert set(shapes) == {((8, 4), (4, 6), (), ())}
    shapes.clear()
    with on_mesh(mesh, RULES):
        out, gradient, out_looked_up = jax.jit(lambda *args: results(*args))(x, table)
    np.testing.assert_array_equal(out_looked_up, out)
    np.testing.assert_allclose(out, expected, rtol=1e-6)  # summed in another order
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    by_batch, by_width = over is None or "batch" in over, over is None or "width" in over
    axes = ("data", "fsdp") if by_batch else ()
    assert set(shapes) == {((2 if by_batch else 8, 4), (4, 3 if by_width else 6), axes, ())}


def test_gradients_equal_those_without_a_mesh(mesh):
    x, weight = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
    weight = weight[:4]

    def loss(x, weight):
        run = shard_mapped(
            lambda x, weight: jnp.tanh(x @ weight), (ROWS, Axes(("depth", "width"))), Axes(("batch", "width"))
        )
        return jnp.sum(run(x, weight) ** 2)

    plain = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weight)
    with on_mesh(mesh, RULES):
        found = jax.jit(jax.grad(lambda *args: loss(*args), argnums=(0, 1)))(x, weight)
        for actual, expected in zip(found, plain, strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-5)


class Counter(nnx.Module):
    """A matrix that records the number of calls and its largest outputs."""

    def __init__(self):
        kernel = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
        self.kernel = nnx.Param(kernel, out_sharding=("depth", "width"))
        self.calls = nnx.Variable(np.zeros((), np.int32), out_sharding=())
        self.largest = nnx.BatchStat(np.zeros(6, np.float32), out_sharding=("width",))

    def __call__(self, x):
        out = x @ self.kernel[...]
        self.calls[...] += 1
        largest = jax.lax.pmax(jnp.abs(out).max(axis=0), mesh_axes("batch"))
        self.largest[...] = jnp.maximum(self.largest[...], largest)
        return out


def call(module, x):
    return module(x)


def names_of(module):
    """Returns the module with each Variable replaced by its logical names."""
    return jax.tree.map(lambda v: Axes(v.out_sharding), module, is_leaf=lambda node: isinstance(node, nnx.Variable))


def through(module, x, whole: bool):
    names = Axes(()) if whole else names_of(module)
    return shard_mapped(call, (names, ROWS), Axes(("batch", None if whole else "width")))(module, x)


@pytest.mark.parametrize("whole", [True, False])
def test_a_module_passes_through_and_its_updates_come_out(mesh, whole):
    """In a compiled program. The test of updates below runs operation by operation."""
    x = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)

    def twice(module, x):
        through(module, x, whole)
        return through(module, 2 * x, whole), module

    with nnx.set_graph_mode(False), nnx.set_graph_updates(False), nnx.use_eager_sharding(False):
        expected, plain = jax.jit(twice)(Counter(), x)
        with on_mesh(mesh, RULES):
            out, module = jax.jit(lambda *args: twice(*args))(Counter(), x)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    assert module.calls[...] == plain.calls[...] == 2
    assert (plain.largest[...] > 0).all()
    np.testing.assert_allclose(module.largest[...], plain.largest[...], atol=1e-6)
    np.testing.assert_array_equal(module.kernel[...], plain.kernel[...])


def test_a_value_that_is_not_equal_on_all_devices_is_found(mesh):
    run = lambda check: shard_mapped(lambda x: x.sum(), (ROWS,), Axes(()), check=check)  # noqa: E731
    with on_mesh(mesh, RULES):
        jax.eval_shape(run(False), np.ones((8, 4)))
        with pytest.raises(ValueError, match="out_specs"):
            jax.eval_shape(run(True), np.ones((8, 4)))


class Seen(nnx.Module):
    """Adds the sum over all devices' rows to its Variable, or to new attributes."""

    def __init__(self):
        self.kernel = nnx.Param(np.arange(24, dtype=np.float32).reshape(4, 6), out_sharding=("depth", "width"))
        self.total = nnx.BatchStat(np.zeros(6, np.float32), out_sharding=("width",))

    def __call__(self, x):
        out = x @ self.kernel[...]
        self.total[...] += jax.lax.psum(out.sum(axis=0), mesh_axes("batch"))
        self.last = nnx.Variable(out)
        self.note = "called"
        return out


@pytest.fixture
def tree_mode():
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False), nnx.use_eager_sharding(False):
        yield


@pytest.mark.parametrize("whole", [True, False])
def test_updates_of_variables_come_back_and_new_attributes_do_not(mesh, tree_mode, whole):
    """The sum is over the devices of the batch; `check` verifies that all have the same sum.

    The names are plain `Axes`, not `nnx.StateSharding`: one for the whole module, or one in place of each Variable.
    """
    module, x = Seen(), np.random.default_rng(2).integers(-4, 5, (8, 4)).astype(np.float32)
    expected = x @ module.kernel[...]
    with on_mesh(mesh, RULES):
        for calls in (1, 2):
            out = through(module, x, whole)
            np.testing.assert_array_equal(module.total[...], calls * expected.sum(axis=0))
    np.testing.assert_array_equal(out, expected)
    assert len(out.sharding.device_set) == 8
    assert set(nnx.state(module)) == {"kernel", "total"}
    assert not hasattr(module, "last")
    assert not hasattr(module, "note")


def test_an_update_that_is_not_equal_on_all_devices_is_found(mesh, tree_mode):
    class Local(Seen):
        def __call__(self, x):
            self.total[...] += (x @ self.kernel[...]).sum(axis=0)  # only the rows of this device
            return x @ self.kernel[...]

    message = r"(?s)out_specs which require replication .*and not \{data,fsdp\}"
    with on_mesh(mesh, RULES), pytest.raises(ValueError, match=message):
        through(Local(), np.ones((8, 4), np.float32), False)


def test_a_variable_in_two_places_is_refused(mesh, tree_mode):
    """In one module or in two: each reference would get a separate update."""

    class Tied(nnx.Module):
        def __init__(self):
            self.embedding = nnx.Param(np.ones((4, 6), np.float32))
            self.head = self.embedding

    everywhere, module, x = Axes(()), Seen(), np.ones((8, 4), np.float32)
    with on_mesh(mesh, RULES):
        with pytest.raises(ValueError, match=r"(?s)Duplicate Param.*\.embedding.*\.head"):
            shard_mapped(lambda tied, x: x @ tied.head[...], (everywhere, ROWS), ROWS)(Tied(), x)
        with pytest.raises(ValueError, match=r"(?s)Duplicate Param.*args\[0\]\.kernel.*args\[1\]\.kernel"):
            shard_mapped(lambda one, two, x: x, (everywhere, everywhere, ROWS), ROWS)(module, module, x)


def test_it_runs_in_tree_mode_whatever_the_mode_around_it(mesh):
    with nnx.set_graph_mode(True), nnx.set_graph_updates(True), nnx.use_eager_sharding(False), on_mesh(mesh, RULES):
        module = Seen()
        through(module, np.ones((8, 4), np.float32), True)
    assert not hasattr(module, "last")
    np.testing.assert_array_equal(module.total[...], 8 * np.arange(24.0).reshape(4, 6).sum(axis=0))
