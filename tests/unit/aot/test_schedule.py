"""The time of the compiler's schedule: which transfers overlap what, on modules of a few instructions."""

import dataclasses
import gzip
import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trainer.aot.chips import CHIPS, Chip
from trainer.aot.cost import analyze
from trainer.aot.roofline import Estimate, estimate

DATA = Path(__file__).parent / "data"
# Each FLOP, and each byte of HBM, ICI, DCN or the host link, takes one second.
UNIT = Chip("unit", (), 1, 0, 1.0, {"bf16": 1.0, "f32": 1.0}, 1.0, 1, 1.0, 1.0)
SLOW = dataclasses.replace(UNIT, ici_bandwidth=1 / 32)  # 32 seconds for a byte on ICI
FAR = dataclasses.replace(UNIT, host_bandwidth=1 / 8)  # 8 seconds for a byte to the host
MESH = {"fsdp": 2}
# A product of 2 * 8 * 8 * 8 FLOPs of arrays in VMEM, and a gather that sends 64 bytes: 1024 and 64 seconds.
PRODUCT, GATHER = 1024.0, 64.0
MODULE = """HloModule m, is_scheduled=true

%sum (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %lr = f32[] add(%l, %r)
}
COMPUTATIONS
ENTRY %main (x: f32[8,8], y: f32[16], h: f32[64]) -> f32[8,8] {
  %x = f32[8,8]{1,0:S(1)} parameter(0)
  %y = f32[16]{0:S(1)} parameter(1)
  %h = f32[64]{0:S(5)} parameter(2)
BODY
}
"""
DOT = "f32[8,8]{1,0:S(1)} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
GROUPS = "channel_id=1, replica_groups={{0,1}}, dimensions={0}"
GATHERED = f"f32[32]{{0:S(1)}} all-gather(%y), {GROUPS}"
START = f"(f32[16]{{0:S(1)}}, f32[32]{{0:S(1)}}) all-gather-start(%y), {GROUPS}"
WRAPPED = f"""
%wrapped (p: f32[16]) -> f32[32] {{
  %p = f32[16]{{0:S(1)}} parameter(0)
  ROOT %all = f32[32]{{0:S(1)}} all-gather(%p), {GROUPS}
}}
"""
WRAP = "((f32[16]{0:S(1)}), f32[32]{0:S(1)}, u32[]{:S(2)}) async-start(%y), calls=%wrapped"


def module(body: Iterable[str], computations: str = "") -> str:
    return MODULE.replace("COMPUTATIONS", computations).replace("BODY", "\n".join(f"  {line}" for line in body))


def timed(*body: str, computations: str = "", once: str = "", chip: Chip = UNIT) -> Estimate:
    """Returns the estimate of a module on two devices. `once`: its collectives after partitioning, if it repeats
    them."""
    partitioned = module([once]) if once else None
    return estimate(analyze(module(body, computations), MESH, partitioned), chip, 2)


def products(count: int) -> list[str]:
    return [f"%x.{i} = {DOT}" for i in range(count)]


FORMS = {
    "a start and an end": (f"%s = {START}", "%d = f32[32]{0:S(1)} all-gather-done(%s)", ""),
    "wrapped": (f"%s = {WRAP}", "%d = f32[32]{0:S(1)} async-done(%s)", WRAPPED),
    "wrapped, with an update": (
        f"%s = {WRAP}",
        f"%u = {WRAP.replace('async-start(%y)', 'async-update(%s)')}\n  %d = f32[32]{{0:S(1)}} async-done(%u)",
        WRAPPED,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_gather_that_the_text_overlaps_costs_what_is_left_of_it(form):
    start, done, computations = FORMS[form]
    whole = timed(f"%g = {GATHERED}", *products(1))
    at_once = timed(start, done, *products(1), computations=computations)
    hidden = timed(start, *products(1), done, computations=computations)
    assert whole.scheduled_seconds == at_once.scheduled_seconds == whole.serial_seconds == PRODUCT + GATHER
    assert hidden.scheduled_seconds == hidden.seconds == PRODUCT
    assert (whole.exposed_network_seconds, hidden.exposed_network_seconds) == (GATHER, 0)
    slow = timed(start, *products(1), done, computations=computations, chip=SLOW)
    assert slow.network_seconds == 32 * GATHER
    assert slow.exposed_network_seconds == 32 * GATHER - PRODUCT
    assert slow.scheduled_seconds == 32 * GATHER


def test_transfers_on_one_link_queue():
    """Two gathers of 2048 seconds start together and overlap one product: the second ends after both."""
    second = START.replace("%y", "%v").replace("channel_id=1", "channel_id=2")
    ends = ["%d = f32[32]{0:S(1)} all-gather-done(%s)", "%e = f32[32]{0:S(1)} all-gather-done(%t)"]
    other = "%v = f32[16]{0:S(1)} parameter(3)"
    both = timed(other, f"%s = {START}", f"%t = {second}", *products(3), *ends, chip=SLOW)
    assert both.exposed_network_seconds == 2 * 32 * GATHER - 3 * PRODUCT
    first_end = timed(other, f"%s = {START}", f"%t = {second}", ends[0], *products(3), ends[1], chip=SLOW)
    assert first_end.exposed_network_seconds == 32 * GATHER


LOOP = """
%more (at: (s32[], f32[8,8], f32[16])) -> pred[] {
  %at = (s32[]{:S(1)}, f32[8,8]{1,0:S(1)}, f32[16]{0:S(1)}) parameter(0)
  %i = s32[]{:S(1)} get-tuple-element(%at), index=0
  %five = s32[]{:S(1)} constant(5)
  ROOT %less = pred[]{:S(1)} compare(%i, %five), direction=LT
}

%round (at: (s32[], f32[8,8], f32[16])) -> (s32[], f32[8,8], f32[16]) {
  %at = (s32[]{:S(1)}, f32[8,8]{1,0:S(1)}, f32[16]{0:S(1)}) parameter(0)
  %i = s32[]{:S(1)} get-tuple-element(%at), index=0
  %x = f32[8,8]{1,0:S(1)} get-tuple-element(%at), index=1
  %y = f32[16]{0:S(1)} get-tuple-element(%at), index=2
INSIDE
  ROOT %out = (s32[]{:S(1)}, f32[8,8]{1,0:S(1)}, f32[16]{0:S(1)}) tuple(%i, %x, %y)
}
"""
KNOWN = 'backend_config={"known_trip_count":{"n":"5"}}'
WHILE = [
    "%zero = s32[]{:S(1)} constant(0)",
    "%begin = (s32[]{:S(1)}, f32[8,8]{1,0:S(1)}, f32[16]{0:S(1)}) tuple(%zero, %x, %y)",
    "%loop = (s32[]{:S(1)}, f32[8,8]{1,0:S(1)}, f32[16]{0:S(1)}) while(%begin), condition=%more, body=%round, " + KNOWN,
]


def looped(*inside: str, before: Iterable[str] = (), after: Iterable[str] = (), chip: Chip = SLOW) -> Estimate:
    computations = LOOP.replace("INSIDE", "\n".join(f"  {line}" for line in inside))
    return timed(*before, *WHILE, *after, computations=computations, chip=chip)


def test_a_loop_waits_in_each_round():
    start, done = f"%s = {START}", "%d = f32[32]{0:S(1)} all-gather-done(%s)"
    inside = looped(start, *products(1), done)
    assert inside.scheduled_seconds == 5 * 32 * GATHER
    assert inside.exposed_network_seconds == 5 * (32 * GATHER - PRODUCT)
    assert looped(start, done, *products(1)).scheduled_seconds == 5 * (32 * GATHER + PRODUCT)
    unfinished = looped(*products(1), start)  # the loop has no `done`, so each round waits at its end
    assert unfinished.scheduled_seconds == 5 * (PRODUCT + 32 * GATHER)
    # A gather that overlaps the first two rounds, which have one product each.
    around = looped(*products(1), before=(start,), after=(done,))
    assert (around.scheduled_seconds, around.exposed_network_seconds) == (5 * PRODUCT, 0)
    # The loop's gather waits once for the gather before the loop.
    busy = looped(start, done, *products(1), before=(start,))
    assert busy.scheduled_seconds == 5 * (PRODUCT + 32 * GATHER) + 32 * GATHER


def test_a_loop_copies_and_prefetches():
    host = looped("%far = f32[64]{0:S(5)} constant({...})", "%near = f32[64]{0:S(1)} copy(%far)")
    assert (host.host_seconds, host.scheduled_seconds) == (5 * 256, 5 * 256)
    # A prefetch of 2048 seconds overlaps the first two rounds.
    slow = dataclasses.replace(UNIT, hbm_bandwidth=1 / 8)
    prefetch = looped(*products(1), before=(ARRAYS[0], PREFETCH), after=(PREFETCHED,), chip=slow)
    assert (prefetch.memory_seconds, prefetch.scheduled_seconds) == (2048, 5 * PRODUCT)


def test_a_branch_takes_its_products_and_no_collectives():
    branches = f"""
%dear (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0:S(1)}} parameter(0)
  %y = f32[16]{{0:S(1)}} constant(0)
  %g = f32[32]{{0:S(1)}} all-gather(%y), {GROUPS}
  ROOT %p = {DOT}
}}

%cheap (x: f32[8,8]) -> f32[8,8] {{
  ROOT %x = f32[8,8]{{1,0:S(1)}} parameter(0)
}}
"""
    taken = "%c = f32[8,8]{1,0:S(1)} conditional(%which, %x, %x), branch_computations={%dear, %cheap}"
    which = "%which = s32[]{:S(1)} constant(0)"
    time = timed(which, taken, *products(1), computations=branches)
    assert (time.scheduled_seconds, time.serial_seconds, time.network_seconds) == (2 * PRODUCT, 2 * PRODUCT, 0)
    hidden = f"%s = {START}", *products(1), "%d = f32[32]{0:S(1)} all-gather-done(%s)"
    beside = timed(which, taken, *hidden, computations=branches)
    assert (beside.network_seconds, beside.exposed_network_seconds) == (GATHER, 0)


def test_a_call_takes_the_time_of_what_it_calls():
    called = f"%called (x: f32[8,8]) -> f32[8,8] {{\n  %x = f32[8,8]{{1,0:S(1)}} parameter(0)\n  ROOT %p = {DOT}\n}}\n"
    time = timed("%c = f32[8,8]{1,0:S(1)} call(%x), to_apply=%called", f"%g = {GATHERED}", computations=called)
    assert time.scheduled_seconds == PRODUCT + GATHER


FUSIONS = f"""
%started (p: f32[16]) -> f32[32] {{
  %p = f32[16]{{0:S(1)}} parameter(0)
  %all = f32[32]{{0:S(1)}} all-gather(%p), {GROUPS}
  ROOT %begin = f32[32]{{0:S(1)}} custom-call(%all), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.1 (p: f32[16], x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0:S(1)}} parameter(1)
  %p = f32[16]{{0:S(1)}} parameter(0)
  %all = f32[32]{{0:S(1)}} all-gather(%p), {GROUPS}
  ROOT %product = {DOT}
}}

%finished (p: f32[16], q: f32[32]) -> f32[32] {{
  %p = f32[16]{{0:S(1)}} parameter(0)
  %q = f32[32]{{0:S(1)}} parameter(1)
  %all = f32[32]{{0:S(1)}} all-gather(%p), {GROUPS}
  ROOT %end = f32[32]{{0:S(1)}} custom-call(%q, %all), custom_call_target="AsyncCollectiveDone"
}}
"""


def test_a_gather_that_overlaps_fusions_counts_once():
    """As on TPUs: fusions between the start and the end repeat the collective."""
    start = "%s = f32[32]{0:S(1)} fusion(%y), kind=kCustom, calls=%started"
    middle = "%m.{} = f32[8,8]{{1,0:S(1)}} fusion(%y, %x), kind=kOutput, calls=%async_collective_fusion.1"
    end = "%e = f32[32]{0:S(1)} fusion(%y, %s), kind=kCustom, calls=%finished"
    body = start, middle.format(1), middle.format(2), end
    hidden, half = (timed(*body, computations=FUSIONS, once=f"%g = {GATHERED}", chip=chip) for chip in (UNIT, SLOW))
    assert (hidden.exposed_network_seconds, hidden.scheduled_seconds) == (0, 2 * PRODUCT)
    assert half.network_seconds == 32 * GATHER
    before = timed(start, middle.format(1), end, *products(1), computations=FUSIONS, once=f"%g = {GATHERED}", chip=SLOW)
    assert before.exposed_network_seconds == 32 * GATHER - PRODUCT
    assert before.scheduled_seconds == 32 * GATHER + PRODUCT


HOST = {
    # The start and the end of each form. All copy 64 float32, or 256 bytes.
    "to the device": (
        "%s = (f32[64]{0}, f32[64]{0:S(5)}, u32[]{:S(2)}) copy-start(%h)",
        "%d = f32[64]{0} copy-done(%s)",
    ),
    "to the host": (
        "%s = (f32[64]{0:S(5)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%z)",
        "%d = f32[64]{0:S(5)} copy-done(%s)",
    ),
    "a part of an array of the host": (
        "%s = ((f32[64]{0:S(5)}), f32[64]{0}, u32[]{:S(2)}) fusion-start(%h), kind=kLoop, calls=%copied",
        "%d = f32[64]{0} fusion-done(%s)",
    ),
    "into an array of the host": (
        "%s = ((f32[512]{0:S(5)}, f32[64]{0}), f32[512]{0:S(5)}, u32[]{:S(2)}) async-start(%big, %z), calls=%written",
        "%d = f32[512]{0:S(5)} async-done(%s)",
    ),
}
COPIES = """
%copied (p: f32[64]) -> f32[64] {
  %p = f32[64]{0:S(5)} parameter(0)
  ROOT %q = f32[64]{0} bitcast(%p)
}

%update (p: f32[512], q: f32[64]) -> f32[512] {
  %p = f32[512]{0:S(5)} parameter(0)
  %q = f32[64]{0} parameter(1)
  %at = s32[] constant(64)
  ROOT %r = f32[512]{0:S(5)} dynamic-update-slice(%p, %q, %at)
}

%written (p: f32[512], q: f32[64]) -> f32[512] {
  %p = f32[512]{0:S(5)} parameter(0)
  %q = f32[64]{0} parameter(1)
  ROOT %r = f32[512]{0:S(5)} fusion(%p, %q), kind=kLoop, calls=%update
}
"""
ARRAYS = ["%z = f32[64]{0} parameter(3)", "%big = f32[512]{0:S(5)} parameter(4)"]
PREFETCH = "%s = (f32[64]{0:S(1)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%z)"
PREFETCHED = "%d = f32[64]{0:S(1)} copy-done(%s)"


@pytest.mark.parametrize("form", HOST)
def test_copies_to_and_from_the_host_take_its_link(form):
    start, end = HOST[form]
    exposed = timed(*ARRAYS, start, end, *products(1), computations=COPIES)
    assert (exposed.host_seconds, exposed.memory_seconds) == (256, 256)
    assert exposed.exposed_host_seconds == 256
    assert exposed.scheduled_seconds == PRODUCT + 256
    assert exposed.serial_seconds == PRODUCT + 2 * 256
    hidden = timed(*ARRAYS, start, *products(1), end, computations=COPIES)
    assert (hidden.scheduled_seconds, hidden.exposed_host_seconds) == (PRODUCT, 0)
    slow = timed(*ARRAYS, start, *products(1), end, computations=COPIES, chip=FAR)
    assert (slow.bound, slow.host_seconds, slow.scheduled_seconds) == ("host", 8 * 256, 8 * 256)
    assert slow.exposed_host_seconds == 8 * 256 - PRODUCT


def test_a_copy_without_an_end_is_waited_for():
    for copy in (
        "%c = f32[64]{0} copy(%h)",
        "%c = f32[64]{0} fusion(%h), kind=kLoop, calls=%copied",
        "%c = f32[512]{0:S(5)} fusion(%big, %z), kind=kLoop, calls=%update",
    ):
        time = timed(*ARRAYS, copy, *products(1), computations=COPIES)
        assert (time.host_seconds, time.exposed_host_seconds, time.scheduled_seconds) == (256, 256, PRODUCT + 256)


def test_links_serve_at_the_same_time():
    """A gather and a copy of 2048 seconds each overlap one product: one wait covers both."""
    chip = dataclasses.replace(FAR, ici_bandwidth=1 / 32)
    copy, copied = HOST["to the device"]
    gather, gathered = f"%g = {START}", "%e = f32[32]{0:S(1)} all-gather-done(%g)"
    time = timed(copy, gather, *products(1), copied, gathered, chip=chip)
    assert (time.exposed_host_seconds, time.exposed_network_seconds) == (2048 - PRODUCT, 0)


def test_a_prefetch_takes_the_time_in_which_hbm_is_free():
    """A prefetch of 256 bytes from HBM to VMEM overlaps a negation of 256 bytes in HBM (read and written), and a
    product of 1024 seconds."""
    start, end, negated = PREFETCH, PREFETCHED, "%n = f32[64]{0} negate(%z)"
    assert timed(*ARRAYS, start, *products(1), end).scheduled_seconds == PRODUCT
    assert timed(*ARRAYS, start, end, *products(1)).scheduled_seconds == PRODUCT + 256
    assert timed(*ARRAYS, start, negated, end).scheduled_seconds == 256 + 512
    assert timed(*ARRAYS, start, negated, *products(1), end).scheduled_seconds == 512 + PRODUCT


MEGASCALE = (
    'channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.1_0",'
    '_xla_megascale_target="{1,2,3,4}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}'
)


def test_slices_exchange_between_send_and_receive():
    """256 bytes on four slices: a device sends 2 * 3/4 of them."""
    sent = f"%s = (f32[64]{{0:S(1)}}, u32[]{{:S(2)}}, token[]) send(%v, %t), {MEGASCALE}"
    received = f"%r = (f32[64]{{0:S(1)}}, u32[]{{:S(2)}}, token[]) recv(%t), {MEGASCALE}"
    begin = ["%v = f32[64]{0:S(1)} parameter(3)", "%t = token[] after-all()", sent, received]
    ends = ["%e = token[] send-done(%s)", "%d = (f32[64]{0:S(1)}, token[]) recv-done(%r)"]
    chip = dataclasses.replace(UNIT, dcn_bandwidth=1 / 4)
    slices = SimpleNamespace(shape={"data": 4}, devices=np.array([SimpleNamespace(slice_index=i) for i in range(4)]))
    reduced = "%r = f32[64]{0:S(1)} all-reduce(%v), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%sum"
    for body, exposed in (([*begin, *ends, *products(1)], 1536), ([*begin, *products(1), *ends], 1536 - PRODUCT)):
        time = estimate(analyze(module(body), slices, module([begin[0], reduced])), chip, 4, 4)
        assert (time.dcn_seconds, time.exposed_network_seconds) == (1536, exposed)
        assert time.scheduled_seconds == PRODUCT + exposed


GPUS = ("jax10", "jax12")


def recorded() -> dict[str, tuple[str, str | None]]:
    texts = {name: (gzip.decompress((DATA / f"two_hosts_{name}.hlo.gz").read_bytes()).decode(), None) for name in GPUS}
    return texts | {"v5e": ((DATA / "v5e_scan.hlo").read_text(), (DATA / "v5e_scan_partitioned.hlo").read_text())}


@pytest.mark.parametrize("name", [*GPUS, "v5e", "cpu"])
def test_the_schedule_is_between_full_overlap_and_none(name, request):
    """Programs for GPUs, for TPUs and for CPUs, with links from 100 times as slow to 100 times as fast."""
    if name == "cpu":
        step = request.getfixturevalue("step")
        text, partitioned, axes = step.texts.optimized, step.texts.partitioned, dict(step.run.mesh.shape)
    else:
        (text, partitioned), axes = recorded()[name], {"data": 2, "fsdp": 2} | ({"tensor": 2} if name in GPUS else {})
    cost = analyze(text, axes, partitioned)
    for chip in CHIPS.values():
        chips = [dataclasses.replace(chip, ici_bandwidth=factor * chip.ici_bandwidth) for factor in (0.01, 1, 100)]
        times = [estimate(cost, each, math.prod(axes.values())) for each in chips]
        assert times[0].scheduled_seconds > times[1].scheduled_seconds > times[2].scheduled_seconds
        for time in times:
            assert time.seconds <= time.scheduled_seconds <= time.serial_seconds
            assert time.exposed_network_seconds <= (time.ici_seconds + time.dcn_seconds) * (1 + 1e-9)  # of sums
