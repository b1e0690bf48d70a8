"""Collectives: groups in each of HLO's forms, mesh axes, counts in loops, bytes on a ring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.aot import dump
from trainer.aot.collectives import collectives, moved, replica_groups
from trainer.aot.hlo import Instruction, parse

AXES = {"data": 2, "fsdp": 2, "tensor": 2}


def instruction(groups):
    return Instruction("x", "all-reduce", (), ("y",), "%y", f", channel_id=1, {groups}, use_global_device_ids=true")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
    ],
)
def test_groups_in_each_form(text, groups):
    assert replica_groups(instruction(text), 8) == groups


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A program with three rounds of collectives on a mesh of 2 x 2 x 2, and one reduction after them."""
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(AXES.values())), tuple(AXES))

    def body(x, _):
        x = x + jax.lax.psum(x, ("data", "fsdp")) * 0.1
        gathered = jax.lax.all_gather(x, "tensor", tiled=True)
        x = x + jax.lax.psum_scatter(gathered, "tensor", tiled=True)
        x = jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)])
        return jax.lax.all_to_all(x, "data", 1, 0, tiled=True).reshape(x.shape), None

    def fn(x):
        x = jax.lax.scan(body, x, length=3)[0]
        return jax.lax.psum(x.astype(jnp.int32).sum(), "fsdp")

    split = PartitionSpec(("data", "fsdp", "tensor"))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False)
    folder = tmp_path_factory.mktemp("dump")
    x = jax.ShapeDtypeStruct((64, 6), jnp.float32, sharding=NamedSharding(mesh, split))
    with dump.uncached():
        jax.jit(mapped).lower(x).compile(compiler_options=dump.options(folder))
    return mesh, dump.read(folder)


def test_kinds_axes_counts_and_bytes(program):
    mesh, texts = program
    found, notes = collectives(parse(texts.partitioned), mesh)
    assert notes == []
    size = 8 * 6 * 4  # eight rows of six float32 on each device
    assert {(c.kind, c.axes): (c.dtype, c.devices, c.size, c.count, c.bytes) for c in found} == {
        ("all-reduce", ("data", "fsdp")): ("f32", 4, size, 3, 3 * 2 * size * 3 / 4),
        ("all-gather", ("tensor",)): ("f32", 2, 2 * size, 3, 3 * size),
        ("reduce-scatter", ("tensor",)): ("f32", 2, 2 * size, 3, 3 * size),
        ("collective-permute", ("fsdp",)): ("f32", 2, size, 3, 3 * size),
        ("all-to-all", ("data",)): ("f32", 2, size, 3, 3 * size / 2),
        ("all-reduce", ("fsdp",)): ("s32", 2, 4, 1, 4),
    }
    assert all(c.slices == 1 and c.sources for c in found)
    assert [c.bytes for c in found] == sorted((c.bytes for c in found), reverse=True)


RING = """HloModule m
%NAME (p: bf16[8]) -> bf16[8] {
  %p = bf16[8]{0} parameter(0)
  ROOT %sent = bf16[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}
ENTRY %main (x: bf16[8]) -> bf16[8] {
  %x = bf16[8]{0} parameter(0)
  ROOT %out = bf16[8]{0} call(%x), to_apply=%NAME
}
"""


@pytest.mark.parametrize("name", ["windowed_dot_general_body_{}.3", "wide.windowed_dot_general_body_{}.3.clone.sunk"])
@pytest.mark.parametrize(("kind", "sums"), [("rs", True), ("ag", False)])
def test_a_ring_of_products_sends_partial_sums_or_operands(name, kind, sums):
    (found,), _ = collectives(parse(RING.replace("NAME", name.format(kind))), {"fsdp": 2})
    assert (found.kind, found.dtype, found.sums) == ("collective-permute", "bf16", sums)


def test_reductions_sum(program):
    mesh, texts = program
    kinds = {c.kind for c in collectives(parse(texts.partitioned), mesh)[0] if c.sums}
    assert kinds == {"all-reduce", "reduce-scatter"}


def test_a_mapping_or_nothing_serves_as_a_mesh(program):
    mesh, texts = program
    module = parse(texts.partitioned)
    assert collectives(module, AXES)[0] == collectives(module, mesh)[0]
    assert {c.axes for c in collectives(module)[0]} == {()}
    with_names, without = collectives(module, mesh)[0], collectives(module)[0]
    assert sum(c.bytes for c in with_names) == sum(c.bytes for c in without)


def test_collectives_in_nested_loops_multiply(tmp_path):
    """One collective at each depth of loops of 2, 3 and 5 rounds, counted before and after XLA's optimizations."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))

    def exchanged(x, places):
        return jax.lax.ppermute(x, "fsdp", [(i, (i + places) % 8) for i in range(8)]) * 0.5

    def loop(rounds, body):
        return lambda x: jax.lax.scan(lambda x, _: (body(x), None), x, length=rounds)[0]

    inner = loop(5, lambda x: exchanged(x, 3))
    middle = loop(3, lambda x: inner(exchanged(x, 2)))
    outer = loop(2, lambda x: middle(exchanged(x, 1)))
    split = PartitionSpec("fsdp")
    mapped = jax.shard_map(lambda x: exchanged(outer(x), 4), mesh=mesh, in_specs=split, out_specs=split)
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, split))
    with dump.uncached():
        optimized = jax.jit(mapped).lower(x).compile(compiler_options=dump.options(tmp_path)).as_text()
    for text in (dump.read(tmp_path).partitioned, optimized):
        found, notes = collectives(parse(text), mesh)
        assert notes == []
        assert sum(c.count for c in found) == 1 + 2 + 2 * 3 + 2 * 3 * 5
        assert sum(c.bytes for c in found) == 39 * 8 * 4


TWICE = """ENTRY %main (a: f32[4]) -> f32[8] {
  %a = f32[4]{0} parameter(0)
  %g.1 = f32[8]{0} all-gather(%a), channel_id=1, replica_groups=[1,2]<=[2], dimensions={0}
  %g.2 = f32[8]{0} all-gather(%a), channel_id=2, replica_groups=[1,2]<=[2], dimensions={0}
  ROOT %s = f32[8]{0} add(%g.1, %g.2)
}
"""


def test_of_equal_collectives_in_a_computation_one_is_counted():
    found, _ = collectives(parse(TWICE), {"fsdp": 2})
    assert [(c.count, c.size) for c in found] == [(1, 32)]


def test_collectives_of_a_step_are_the_same_before_and_after_optimization(step):
    """Tested on CPU, where the optimized module contains each collective once."""

    def sums(text):
        totals: dict[tuple[str, tuple[str, ...]], float] = {}
        for c in collectives(parse(text), step.run.mesh)[0]:
            totals[c.kind, c.axes] = totals.get((c.kind, c.axes), 0) + c.bytes
        return totals

    after = sums(step.texts.partitioned)
    assert {axes for _, axes in after} == {("data",), ("fsdp",), ("data", "fsdp")}
    assert {key: pytest.approx(value, rel=0.01) for key, value in sums(step.texts.optimized).items()} == after


def test_devices_know_their_slice(program):
    _, texts = program

    class Device:
        def __init__(self, number):
            self.slice_index = number // 4

    class Slices:
        shape = AXES
        devices = np.array([Device(i) for i in range(8)]).reshape(2, 2, 2)

    found, _ = collectives(parse(texts.partitioned), Slices())
    assert {c.axes: c.slices for c in found} == {("data", "fsdp"): 2, ("data",): 2, ("fsdp",): 1, ("tensor",): 1}


def test_bytes_on_a_ring():
    assert moved("all-gather", 1000, 4) == moved("reduce-scatter", 1000, 4) == moved("all-to-all", 1000, 4) == 750
    assert moved("all-reduce", 1000, 4) == 1500
    assert moved("collective-permute", 1000, 4) == 1000
