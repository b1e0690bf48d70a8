"""The gradient of a replicated table: exact sums, and only one array of the table's size."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.aot import dump
from trainer.aot.cost import analyze
from trainer.aot.topologies import devices_of
from trainer.config.topologies import find_topology
from trainer.sharding import on_mesh, take

RULES = {"batch": ("data",), "length": (), "width": ("tensor",), "embed": (), "vocab": ("tensor",)}
TABLE, ROWS = ("vocab", "embed"), ("batch", "length", "embed")


def make_mesh(devices, data, tensor=1):
    return Mesh(np.array(devices).reshape(data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def gradient(table, ids, rows, names=TABLE, out_names=ROWS):
    return jax.grad(lambda table: jnp.sum(take(table, ids, out_names, jnp.bfloat16, names) * rows))(table)


def program(mesh, **how):
    shapes = (64, 8), (8, 32), (8, 32, 8)
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, (float, int, jnp.bfloat16), strict=True)]
    with on_mesh(mesh, RULES):
        return str(jax.make_jaxpr(lambda *args: gradient(*args, **how))(*args))


def test_each_device_sums_in_order_and_the_sums_are_the_same(monkeypatch):
    monkeypatch.setattr("trainer.sharding.lookup.on_tpu", lambda: True)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 64, (8, 32)).astype(np.int32)
    rows = rng.integers(-9, 9, (8, 32, 8)).astype(jnp.bfloat16)  # integers: any order has the same sums
    table = jnp.ones((64, 8))
    mesh = make_mesh(jax.devices(), 8)
    with on_mesh(mesh, RULES):
        found = jax.jit(lambda *args: gradient(*args))(table, ids, rows)
    expected = np.zeros((64, 8), np.float32)
    np.add.at(expected, np.asarray(ids), np.asarray(rows, np.float32))
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == jnp.float32
    assert "indices_are_sorted=True" in program(mesh)


def test_the_backward_pass_is_that_of_the_forward_passs_mesh(monkeypatch):
    """JAX traces the backward pass in its caller's context: outside of the mesh, or inside another mesh."""
    monkeypatch.setattr("trainer.sharding.lookup.on_tpu", lambda: True)
    table, ids, rows = jnp.ones((64, 8)), jnp.zeros((8, 32), int), jnp.ones((8, 32, 8))
    with on_mesh(make_mesh(jax.devices(), 8), RULES):
        _, pull = jax.vjp(lambda table: take(table, ids, ROWS, names=TABLE), table)
    backward = str(jax.make_jaxpr(pull)(rows))
    assert "indices_are_sorted=True" in backward
    assert "shard_map" in backward


def test_only_where_devices_hold_the_whole_table(monkeypatch):
    data, both = make_mesh(jax.devices(), 8), make_mesh(jax.devices(), 4, 2)
    assert "sort[" not in program(data)  # this is not a TPU
    monkeypatch.setattr("trainer.sharding.lookup.on_tpu", lambda: True)
    assert "sort[" in program(data)
    assert "sort[" not in program(both)  # the table is sharded
    assert "sort[" not in program(make_mesh(jax.devices()[:1], 1))  # no devices to reduce over
    assert "sort[" not in program(data, names=None)
    replicated = {"names": ("length", "length"), "out_names": ("batch", "length", "width")}
    assert "sort[" in program(data, **replicated)
    assert "sort[" not in program(both, **replicated)  # the rows are sharded


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "context": 2}])
def test_devices_look_up_and_sum_their_columns_only(sizes):
    """Otherwise the compiler reduces the whole table over all devices and, if rows are split, also all-gathers it."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    length, embed = tuple(sizes)[2:], tuple(sizes)[1:]
    rules = {"batch": ("data", "fsdp"), "length": length, "embed": embed, "width": (), "vocab": ()}
    rng = np.random.default_rng(0)
    table = rng.integers(-9, 9, (64, 8)).astype(np.float32)  # integers: any order has the same sums
    ids, rows = rng.integers(0, 64, (8, 32)).astype(np.int32), rng.integers(-9, 9, (8, 32, 8)).astype(jnp.bfloat16)
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((("data", "fsdp"), length), (None, embed)))
    out = {"out_names": ("batch", "length", "width"), "names": TABLE}
    with on_mesh(mesh, rules):
        compiled = (
            jax.jit(
                lambda table, ids, rows: (
                    take(table, ids, dtype=jnp.bfloat16, **out),
                    gradient(table, ids, rows, **out),
                ),
                in_shardings=(split, whole, whole),
                out_shardings=(whole, split),
            )
            .lower(table, ids, rows)
            .compile()
        )
    found = compiled(table, ids, rows)
    expected = np.zeros((64, 8), np.float32)
    np.add.at(expected, np.asarray(ids), np.asarray(rows, np.float32))
    np.testing.assert_array_equal(found[0], np.asarray(table)[ids])
    np.testing.assert_array_equal(found[1], expected)
    moved = [each for each in analyze(compiled.as_text(), mesh).collectives if each.dtype != "s32"]
    assert [(it.axes, it.size) for it in moved if it.kind == "all-reduce"] == [(("data",), 64 * 8 * 4 // 4)]
    if length:
        assert {it.kind for it in moved} == {"all-reduce", "all-to-all"}


@pytest.mark.rest(covered_by="the same count on CPU devices")
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="there is no libtpu but for Linux on x86-64")
def test_a_tpu_holds_one_gradient_of_a_table():
    mesh = make_mesh(devices_of(find_topology("v5e-4")), 4)
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    shapes = ((32768, 1024), jnp.float32, whole), ((4, 2048), jnp.int32, split), ((4, 2048, 1024), jnp.bfloat16, split)
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=at) for shape, dtype, at in shapes]

    def update(table, ids, rows):
        return table - 0.5 * gradient(table, ids, rows)

    with on_mesh(mesh, RULES), dump.uncached():  # a program for an absent TPU cannot be read back from the cache
        compiled = jax.jit(update, donate_argnums=0).lower(*args).compile()
    size = 32768 * 1024 * 4
    assert size <= compiled.memory_analysis().temp_size_in_bytes < 1.02 * size
