"""Costs of GPU programs: programs stored by two versions of JAX (data/write_gpu.py), and single kernels."""

import gzip
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trainer.aot.cost import analyze
from trainer.config.load import load
from trainer.models.flops import matmul_parameters

DATA = Path(__file__).parent / "data"
AXES = {"data": 2, "fsdp": 2, "tensor": 2}
LAYERS, EMBED, MLP, VOCAB, LENGTH, HEADS, WIDTH, DOCUMENTS = 3, 256, 512, 512, 256, 4, 64, 5


@pytest.fixture(scope="module", params=["jax10", "jax12"])
def text(request):
    return gzip.decompress((DATA / f"two_hosts_{request.param}.hlo.gz").read_bytes()).decode()


@pytest.fixture(scope="module")
def cost(text):
    hosts = [SimpleNamespace(slice_index=number // 4) for number in range(8)]
    return analyze(text, SimpleNamespace(shape=AXES, devices=np.array(hosts).reshape(2, 2, 2)))


@pytest.fixture(scope="module")
def parameters():
    """The number of parameters of matrix products."""
    sys.path.insert(0, str(DATA))
    from write_gpu import WORDS

    return matmul_parameters(load(WORDS.split()).config)


def test_products_are_those_of_the_closed_form(cost, parameters):
    """Rematerialization adds the blocks' forward pass without the last product. Products are computed by cuBLAS and in
    fusions. cuDNN's attention computes two products of scores forward, two again in rematerialization and five
    backward, for documents of equal length that fill the row."""
    rows = 2 * 8 / 4  # of a device, which also has only half of the heads
    again = parameters - EMBED * VOCAB - LAYERS * EMBED * MLP
    dense = 2 * rows * LENGTH * (3 * parameters + again) / 2
    part = LENGTH / DOCUMENTS
    scores = rows * LAYERS * HEADS / 2 * DOCUMENTS * part * (part + 1) / 2
    assert cost.matmul_flops == {"bf16": pytest.approx(dense + 9 * 2 * scores * WIDTH, rel=1e-9)}
    assert cost.notes == ()


def test_gradients_are_summed_between_the_hosts(cost, parameters):
    """Between hosts, each device sums in bfloat16 only the gradients of its part of the matrix products' parameters."""
    between = [each for each in cost.collectives if each.axes == ("data",) and each.sums and each.dtype == "bf16"]
    assert {each.slices for each in between} == {2}
    assert sum(each.size * each.count for each in between) == 2 * parameters / 4
    assert {each.slices for each in cost.collectives if "data" not in each.axes} == {1}
    assert {each.kind for each in cost.collectives} >= {"all-gather", "all-reduce", "reduce-scatter"}


def test_weights_are_gathered_in_each_layer(cost):
    """The four matrices of attention and the three of the MLP are gathered over fsdp in bfloat16, forward and again."""
    found = [
        each for each in cost.collectives if (each.kind, each.axes, each.dtype) == ("all-gather", ("fsdp",), "bf16")
    ]
    small = sum(each.count for each in found if each.size < 2 * EMBED * MLP / 2)
    large = sum(each.count for each in found if each.size == 2 * EMBED * MLP / 2)
    assert small >= 2 * LAYERS * 4
    assert large >= 2 * LAYERS * 3


def test_traffic_grows_with_the_layers_and_not_with_their_square(text):
    """A loop over more layers reads and writes one layer's part of each stacked array in an iteration."""

    def traffic(layers):
        more = text.replace('"known_trip_count":{"n":"3"}', f'"known_trip_count":{{"n":"{layers}"}}')
        return analyze(re.sub(r"(?<=[\[,])3(?=[,\]])", f"{layers}", more)).hbm_bytes

    three, six, nine = map(traffic, (3, 6, 9))
    assert nine - six == pytest.approx(six - three, rel=1e-3)
    assert six > 1.5 * three


START = """
HloModule m

%fused (a: f32[8,4], i: s32[]) -> f32[1,4] {
  %a = f32[8,4] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,4] dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,4}
}

%wrapped (a: f32[8,4], i: s32[]) -> f32[1,4] {
  %a.1 = f32[8,4] parameter(0)
  %i.1 = s32[] parameter(1)
  ROOT %slice.1 = f32[1,4] fusion(%a.1, %i.1), kind=kLoop, calls=%fused
}

%gathered (b: f32[1,4]) -> f32[2,4] {
  %b.2 = f32[1,4] parameter(0)
  ROOT %all.2 = f32[2,4] all-gather(%b.2), replica_groups=[1,2]<=[2], dimensions={0}
}

ENTRY %main (a: f32[8,4], i: s32[]) -> f32[2,4] {
  %a.3 = f32[8,4] parameter(0)
  %i.3 = s32[] parameter(1)
BODY
}
"""
SYNCHRONOUS = """  %b = f32[1,4] fusion(%a.3, %i.3), kind=kLoop, calls=%fused
  %c = f32[2,4] all-gather(%b), replica_groups={{0,1}}, dimensions={0}
  ROOT %d = f32[2,4] all-reduce(%c), replica_groups={{0,1}}, to_apply=%sum"""
STARTED = """  %s = ((f32[8,4], s32[]), f32[1,4], u32[]) fusion-start(%a.3, %i.3), kind=kLoop, calls=%fused
  %b = f32[1,4] fusion-done(%s)
  %t = ((f32[1,4]), f32[2,4]) all-gather-start(%b), replica_groups=[1,2]<=[2], dimensions={0}
  %c = f32[2,4] all-gather-done(%t)
  %u = f32[2,4] all-reduce-start(%c), replica_groups=mesh['x'=2] {'x'}, to_apply=%sum
  ROOT %d = f32[2,4] all-reduce-done(%u)"""
WRAPPED = """  %s = ((f32[8,4], s32[]), f32[1,4], u32[]) async-start(%a.3, %i.3), calls=%wrapped
  %b = f32[1,4] async-done(%s)
  %t = ((f32[1,4]), f32[2,4]) async-start(%b), calls=%gathered
  %c = f32[2,4] async-done(%t)
  ROOT %d = f32[2,4] all-reduce(%c), replica_groups={{0,1}}, to_apply=%sum"""


def test_what_is_started_and_done_counts_as_what_is_waited_for():
    costs = [analyze(START.replace("BODY", body), {"x": 2}) for body in (SYNCHRONOUS, STARTED, WRAPPED)]
    assert costs[0] == costs[1] == costs[2]
    assert costs[0].bytes_accessed == (16 + 4 + 16) + (16 + 32) + (32 + 32)
    assert [(each.kind, each.size, each.count) for each in costs[0].collectives] == [
        ("all-reduce", 32, 1),
        ("all-gather", 32, 1),
    ]


CALL = """
HloModule m

ENTRY %main () -> bf16[2,1024,4,64] {
  %q = bf16[2,1024,4,64] parameter(0)
  %k = bf16[2,1024,2,64] parameter(1)
  %v = bf16[2,1024,2,32] parameter(2)
  ROOT %r = (bf16[2,4,1024,32], f32[2,4,1024], u8[99]) custom-call(%q, %k, %v), TARGET, KEYS
}
"""


@pytest.mark.parametrize("end", ["", "Backward"])
@pytest.mark.parametrize(
    ("mask", "window", "documents", "seen"),
    [
        ("NO_MASK", 0, 1, lambda q, k: q + k >= 0),
        ("CAUSAL", 0, 1, lambda q, k: q >= k),
        ("PADDING_CAUSAL", 0, 1, lambda q, k: q >= k),
        ("CAUSAL", 100, 1, lambda q, k: (q >= k) & (q - k < 100)),
        ("CAUSAL", 5000, 1, lambda q, k: q >= k),
        ("PADDING_CAUSAL", 0, 4, lambda q, k: (q >= k) & (q // 256 == k // 256)),
        ("PADDING_CAUSAL", 100, 4, lambda q, k: (q >= k) & (q // 256 == k // 256) & (q - k < 100)),
    ],
)
def test_attention_of_cudnn_computes_the_scores_that_its_masks_leave(end, mask, window, documents, seen):
    keys = f'"mask_type": "{mask}", "sliding_window_length": {window}, "max_seg_per_batch": {documents}'
    target = f'custom_call_target="__cudnn$fmhaSoftmax{end}"'
    cost = analyze(CALL.replace("TARGET", target).replace("KEYS", f"backend_config={{{keys}}}"))
    index = np.arange(1024)
    scores = 2 * 4 * np.count_nonzero(seen(index[:, None], index[None]))
    widths = 3 * 64 + 2 * 32 if end else 64 + 32
    assert (cost.matmul_flops, cost.transcendentals) == ({"bf16": 2.0 * scores * widths}, scores)
    operands = math.prod((2, 1024, 4, 64)) + math.prod((2, 1024, 2, 64)) + math.prod((2, 1024, 2, 32))
    assert cost.hbm_bytes == 2 * operands + 2 * math.prod((2, 4, 1024, 32)) + 4 * math.prod((2, 4, 1024))
