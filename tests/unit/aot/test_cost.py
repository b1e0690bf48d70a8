"""A step's counts, compared with XLA's counts where both count alike, with closed forms, and on a TPU program."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compiler import EXACT

from trainer.aot.chips import CHIPS
from trainer.aot.cost import analyze
from trainer.aot.roofline import estimate
from trainer.config.resolve import resolve
from trainer.models.flops import flops_per_token
from trainer.training.build import build

DATA = Path(__file__).parent / "data"


def compiled(fn, *shapes):
    return jax.jit(fn).lower(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]).compile(EXACT)


def block(x, w):
    h = jax.nn.softmax(jnp.tanh(x @ w), axis=-1) * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)
    h = jnp.concatenate([h[:, :16], jnp.where(h > 0.1, h, jnp.exp(-h))[:, 16:]], axis=1)
    return jnp.sum(jnp.log1p(h @ w.T))


PROGRAMS = {
    "product": lambda x, w: x @ w,
    "batched product": lambda x, w: jnp.einsum("abc,dbc->bad", x.reshape(8, 8, 48), w.T.reshape(12, 8, 48)),
    "sum": lambda x, w: (x.sum(axis=1), w.max(axis=0)),
    "exponentials": lambda x, w: (jnp.exp(x), jnp.tanh(w) ** 3.5),
    "take": lambda x, w: jnp.take(w, x[:8, 0].astype(int), axis=0),
    "scatter": lambda x, w: w.at[x[:, 0].astype(int)].add(1.0),
    "slices": lambda x, w: jax.lax.dynamic_update_slice(w, x[:4, :8], (x[0, 0].astype(int), 0)) + 1,
    "running sum": lambda x, w: jnp.cumsum(x, axis=0),
    "block": block,
    "gradients": jax.grad(block, argnums=(0, 1)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_loops_the_counts_are_xlas(name):
    program = compiled(PROGRAMS[name], (64, 48), (48, 96))
    theirs, ours = program.cost_analysis(), analyze(program.as_text())
    assert ours.flops == pytest.approx(theirs.get("flops", 0), rel=0.001)
    assert ours.transcendentals == pytest.approx(theirs.get("transcendentals", 0), rel=0.001)
    assert ours.rolled_bytes_accessed == pytest.approx(theirs["bytes accessed"], rel=0.01)
    assert ours.hbm_bytes == ours.bytes_accessed
    assert ours.rolled_flops == ours.flops
    # For a fused scatter, XLA counts the whole array that it writes to.
    assert (ours.rolled_bytes_accessed > ours.bytes_accessed) == (name == "scatter")


VMEM = """ENTRY %main (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %start = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0}, u32[]{:S(2)}) copy-start(%a)
  %done = f32[1024]{0:T(1024)S(1)} copy-done(%start)
  %sum = f32[1024]{0:T(1024)S(1)} add(%done, %done)
  ROOT %out = f32[1024]{0} negate(%sum)
}
"""


def test_main_memory_is_touched_where_arrays_lie_in_it():
    """The copy reads HBM and writes VMEM. The sum accesses VMEM three times. The result is read from VMEM and written
    to HBM."""
    cost = analyze(VMEM)
    assert cost.bytes_accessed == 7 * 4096
    assert cost.hbm_bytes == 2 * 4096


OVERLAPPED = """%async_collective_fusion.1 (p: f32[16], q: f32[64], x: f32[8]) -> (f32[8], f32[16], f32[64]) {
  %x = f32[8]{0} parameter(2)
  %y = f32[8]{0} negate(%x)
  %p = f32[16]{0} parameter(0)
  %q = f32[64]{0} parameter(1)
  %gathered = f32[64]{0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %all = (f32[8]{0}, f32[16]{0}, f32[64]{0}) tuple(%y, %p, %gathered)
}

ENTRY %main (p: f32[16], q: f32[64], x: f32[8]) -> (f32[8], f32[16], f32[64]) {
  %p = f32[16]{0} parameter(0)
  %q = f32[64]{0} parameter(1)
  %x = f32[8]{0} parameter(2)
  ROOT %f = (f32[8]{0}, f32[16]{0}, f32[64]{0}) fusion(%p, %q, %x), kind=kOutput, calls=%async_collective_fusion.1
}
"""


def test_a_collective_that_goes_on_meanwhile_is_not_counted_again():
    assert analyze(OVERLAPPED).bytes_accessed == 2 * 8 * 4
    assert analyze(OVERLAPPED).rolled_bytes_accessed == (8 + 16 + 8 + 64) * 4
    elsewhere = analyze(OVERLAPPED.replace("async_collective_fusion", "fused_computation"))
    assert elsewhere.bytes_accessed == elsewhere.rolled_bytes_accessed


PARTS = """ENTRY %main (a: f32[1024], i: s32[8], s: s32[]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %i = s32[8,1]{1,0} parameter(1)
  %s = s32[] parameter(2)
  %taken = f32[8]{0} gather(%a, %i), offset_dims={}, collapsed_slice_dims={0}, start_index_map={0}, slice_sizes={1}
  %cut = f32[16]{0} dynamic-slice(%a, %s), dynamic_slice_sizes={16}
  %front = f32[32]{0} slice(%a), slice={[0:32]}
  ROOT %set = f32[1024]{0} dynamic-update-slice(%a, %cut, %s)
}
"""


def test_parts_of_an_array_are_touched_and_no_more():
    gather, cut, front, set_in_place = 2 * 32 + 32, 2 * 64 + 4, 2 * 128, 2 * 64 + 4
    assert analyze(PARTS).bytes_accessed == gather + cut + front + set_in_place


def test_loops_count_as_often_as_they_run_and_nested_ones_multiply():
    def fn(x, w):
        def inner(x, _):
            return jnp.tanh(x @ w), None

        def outer(x, _):
            return jax.lax.scan(inner, x, length=5)[0] + 1, None

        return jax.lax.scan(outer, x, length=3)[0]

    cost = analyze(compiled(fn, (32, 32), (32, 32)).as_text())
    assert cost.matmul_flops == {"f32": 15 * 2 * 32**3}
    assert cost.transcendentals == 15 * 32 * 32
    assert cost.rolled_flops < 2 * 2 * 32**3
    assert cost.notes == ()


BRANCHES = """%dear (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %twice = f32[1024]{0} add(%a, %a)
  ROOT %more = f32[1024]{0} multiply(%twice, %a)
}

%cheap (b: f32[1024]) -> f32[1024] {
  %b = f32[1024]{0} parameter(0)
  ROOT %less = f32[1024]{0} negate(%b)
}

%wide (c: f32[1024]) -> f32[1024] {
  %c = f32[1024]{0} parameter(0)
  %once = f32[1024]{0} copy(%c)
  %again = f32[1024]{0} copy(%once)
  %and_again = f32[1024]{0} copy(%again)
  ROOT %same = f32[1024]{0} negate(%and_again)
}

ENTRY %main (which: s32[], x: f32[1024]) -> f32[1024] {
  %which = s32[] parameter(0)
  %x = f32[1024]{0} parameter(1)
  ROOT %out = f32[1024]{0} conditional(%which, TAKEN), branch_computations={BRANCHES}
}
"""


@pytest.mark.parametrize(
    ("branches", "operations", "accesses"),
    [
        *((names, 2, 6) for names in itertools.permutations(["dear", "cheap", "wide"])),
        # Of branches with equally many operations, the one with more traffic costs more.
        *((names, 1, 8) for names in itertools.permutations(["cheap", "wide"])),
    ],
)
def test_a_conditional_costs_what_its_dearest_branch_costs(branches, operations, accesses):
    names = ", ".join(f"%{name}" for name in branches)
    cost = analyze(BRANCHES.replace("TAKEN", ", ".join(["%x"] * len(branches))).replace("{BRANCHES}", f"{{{names}}}"))
    assert (cost.flops, cost.bytes_accessed) == (operations * 1024, accesses * 4096)


def test_the_rolled_counts_of_a_step_are_xlas(step):
    theirs, ours = step.compiled.cost_analysis(), analyze(step.compiled.as_text())
    assert ours.rolled_flops == pytest.approx(theirs["flops"], rel=0.001)
    assert ours.rolled_bytes_accessed == pytest.approx(theirs["bytes accessed"], rel=0.001)
    assert ours.notes == ()


def test_a_step_multiplies_matrices_as_the_closed_form_says(step):
    """Rematerialization adds the blocks' forward pass, except for the last product, which no backward pass reads."""
    config = step.run.config
    tokens = step.run.rows * config.max_target_length / 8
    head = 2 * config.base_emb_dim * config.vocab_size
    output = 2 * config.base_emb_dim * config.base_mlp_dim
    every = flops_per_token(config, keys=config.max_target_length)
    again = every / 3 - head - config.base_num_decoder_layers * output
    assert analyze(step.compiled.as_text()).matmul_flops == {"f32": pytest.approx(tokens * (every + again), rel=1e-9)}


@pytest.mark.rest(covered_by="loops that count as often as they run")
def test_an_unrolled_step_multiplies_as_much_as_a_scanned_one(step):
    config = resolve(dict(step.run.config.items()) | {"scan_layers": False}, device_count=8, platform="cpu")
    run = build(config, jax.devices())
    unrolled = run.step.lower(*run.abstract_args()).compile(EXACT)
    whole, rolled = analyze(step.compiled.as_text()), analyze(unrolled.as_text())
    assert rolled.matmul_flops == whole.matmul_flops
    assert rolled.rolled_flops == rolled.flops == pytest.approx(whole.flops, rel=0.05)


def test_a_tpus_program_with_its_kernels():
    """The program of data/write_v5e_scan.py: four rows on four devices, one row on each."""
    layers, length, heads, head_dim, width = 3, 1024, 2, 128, 256
    product = 2 * length * width * heads * head_dim
    # Blocks that the fwd, dkv and dq kernels visit: 1, 1, 2, 2 of 256 x 512; 2, 2, 1, 1 of 512 x 256; 1, 2 of 512 x
    # 512. Products per block: 2, 4, 3.
    kernels = 2 * heads * head_dim * (2 * 6 * 256 * 512 + 4 * 6 * 512 * 256 + 3 * 3 * 512 * 512)
    mesh = {"data": 2, "fsdp": 2}
    cost = analyze((DATA / "v5e_scan.hlo").read_text(), mesh, (DATA / "v5e_scan_partitioned.hlo").read_text())
    assert cost.matmul_flops == {"bf16": layers * (6 * product + kernels)}
    assert cost.notes == ()
    # XLA's analysis returns 809859072 for this program: it counts one layer, and nothing for the kernels.
    assert cost.rolled_flops - kernels == pytest.approx(809859072, rel=0.001)
    # Some of the arrays are in the chip's VMEM.
    assert 0.2 * cost.bytes_accessed < cost.hbm_bytes < 0.8 * cost.bytes_accessed
    gathered = [c for c in cost.collectives if c.kind == "all-gather"]
    assert [(c.axes, c.dtype, c.size, c.count) for c in gathered] == [
        (("fsdp",), "bf16", width * 2 * 128 * 2, 2 * layers)
    ]
    reduced = {c.axes: (c.dtype, c.count, c.bytes) for c in cost.collectives if c.kind == "all-reduce"}
    assert reduced == {("fsdp",): ("bf16", 6, 6 * 131072), ("data",): ("bf16", 6, 6 * 65536)}


def test_what_cannot_be_counted_is_said():
    text = (DATA / "v5e_scan.hlo").read_text()
    cost = analyze(text.replace("splash_mha", "other_mha").replace("direction=LT", "direction=NE"))
    assert len(cost.notes) > 3
    assert any("kernel" in note and "other_mha" in note for note in cost.notes)
    assert any("loop" in note for note in cost.notes)
    overlapped = VMEM.replace("copy-done(%start)", 'custom-call(%start), custom_call_target="AsyncCollectiveStart"')
    assert [note for note in analyze(overlapped).notes if "repeats" in note]
    assert analyze(overlapped, None, VMEM).notes == ()


# As libtpu 0.0.51 writes jax.lax.ragged_dot for v5e: 1024 rows [512], 4 matrices [512, 256]. Shortened.
GROUPED = """%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%copies (x: bf16[1024,512]) -> bf16[4,1024,512] {
  %x = bf16[1024,512]{1,0} parameter(0)
  ROOT %each = bf16[4,1024,512]{2,1,0} broadcast(%x), dimensions={1,2}
}

%convolution_select_fusion (w: bf16[4,512,256], x: bf16[1024,512], mask: pred[4,1024]) -> bf16[1024,256] {
  %mask = pred[4,1024]{1,0} parameter(2)
  %own = pred[4,1024,256]{2,1,0} broadcast(%mask), dimensions={0,1}
  %x = bf16[1024,512]{1,0} parameter(1)
  %each = bf16[4,1024,512]{2,1,0} fusion(%x), kind=kLoop, calls=%copies
  %w = bf16[4,512,256]{2,1,0} parameter(0)
  %dense = bf16[4,1024,256]{2,1,0} convolution(%each, %w), window={size=4 stride=3 lhs_dilate=4}, LABELS
  %zero = bf16[] constant(0)
  %zeros = bf16[4,1024,256]{2,1,0} broadcast(%zero), dimensions={}
  %selected = bf16[4,1024,256]{2,1,0} select(%own, %dense, %zeros)
  %out = bf16[1024,256]{1,0} reduce(%selected, %zero), dimensions={0}, to_apply=%add
  ROOT %negative = bf16[1024,256]{1,0} negate(%out)
}

ENTRY %main (x: bf16[1024,512], w: bf16[4,512,256], mask: pred[4,1024]) -> bf16[1024,256] {
  %x = bf16[1024,512]{1,0} parameter(0)
  %w = bf16[4,512,256]{2,1,0} parameter(1)
  %mask = pred[4,1024]{1,0} parameter(2)
  ROOT %out = bf16[1024,256]{1,0} fusion(%w, %x, %mask), kind=kOutput, calls=%convolution_select_fusion, SETTINGS
}
"""
GROUPED = GROUPED.replace("LABELS", "dim_labels=0bf_0io->0bf")
OF_KERNEL = 'backend_config={"convolution_algorithm_config":{"is_ragged_dot":true,"num_groups_in_ragged_dot":"4"}}'


def test_rows_of_a_grouped_product_are_multiplied_with_their_own_group():
    """Operations that are fused with the product count once, too. The rolled counts follow XLA, which multiplies each
    row with every group."""
    product, results = 2 * 1024 * 512 * 256, 1024 * 256
    cost = analyze(GROUPED.replace("SETTINGS", OF_KERNEL))
    assert (cost.matmul_flops, cost.flops) == ({"bf16": product}, product + results)
    assert cost.rolled_flops == 4 * product + 4 * results + 3 * results + results
    assert cost.bytes_accessed == 2 * (1024 * 512 + 4 * 512 * 256 + 1024 * 256) + 4 * 1024
    dense = analyze(GROUPED.replace("SETTINGS", "backend_config={}"))
    assert dense.flops == dense.rolled_flops == cost.rolled_flops


ROUNDS = """%more (at: (s32[], s32[], f32[64])) -> pred[] {
  %at = (s32[], s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%at), index=0
  %rounds = s32[] get-tuple-element(%at), index=1
  ROOT %less = pred[] compare(%i, %rounds), direction=LT
}

%round (at: (s32[], s32[], f32[64])) -> (s32[], s32[], f32[64]) {
  %at = (s32[], s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%at), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %rounds = s32[] get-tuple-element(%at), index=1
  %x = f32[64]{0} get-tuple-element(%at), index=2
  %y = f32[64]{0} BODY
  ROOT %out = (s32[], s32[], f32[64]{0}) tuple(%next, %rounds, %y)
}

ENTRY %main (n: s32[], x: f32[64]) -> (s32[], s32[], f32[64]) {
  %n = s32[] parameter(0)
  %x = f32[64]{0} parameter(1)
  %zero = s32[] constant(0)
  %five = s32[] constant(5)
  %start = (s32[], s32[], f32[64]{0}) tuple(%zero, %n, %x)
  ROOT %loop = (s32[], s32[], f32[64]{0}) while(%start), condition=%more, body=%round
}
"""
SUM = ROUNDS.replace("BODY", "all-reduce(%x), channel_id=1, replica_groups=[1,2]<=[2], to_apply=%more")
KNOWN = {
    "constant": ("(%zero, %n,", "(%zero, %five,"),
    "known": ("body=%round", 'body=%round, {"known_trip_count":{"n":"5"}}'),
}


def test_a_loop_of_unknown_length_gives_a_lower_bound():
    """Data determines the limit of the loop. One iteration counts."""
    cost = analyze(ROUNDS.replace("BODY", "negate(%x)"))
    assert cost.flops == 64 + 2
    assert (cost.unknown_loops, len(cost.notes)) == (("loop",), 1)
    assert estimate(cost, CHIPS["v5e"], devices=2).lower_bound


@pytest.mark.parametrize("known", KNOWN)
def test_a_loop_of_known_length_takes_the_time_of_all_its_rounds(known):
    cost = analyze(SUM.replace(*KNOWN[known]), {"fsdp": 2})
    assert (cost.unknown_loops, cost.notes, cost.collectives[0].count) == ((), (), 5)
    five, one = (estimate(each, CHIPS["v5e"], devices=2) for each in (cost, analyze(SUM, {"fsdp": 2})))
    assert (five.lower_bound, one.lower_bound) == (False, True)
    assert five.scheduled_seconds == pytest.approx(5 * one.scheduled_seconds)


def test_the_partitioned_loops_count_if_they_have_collectives():
    exact = ROUNDS.replace("BODY", "negate(%x)").replace(*KNOWN["known"])
    assert analyze(exact, {"fsdp": 2}, SUM).unknown_loops == ("loop",)
    assert analyze(exact, {"fsdp": 2}, ROUNDS.replace("BODY", "negate(%x)")).unknown_loops == ()


def test_a_cost_is_json(step):
    cost = analyze(step.compiled.as_text(), step.run.mesh).as_dict()
    assert json.loads(json.dumps(cost))["collectives"][0]["axes"]
    assert "schedule" not in cost
