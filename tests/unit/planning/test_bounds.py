"""Bounds are below the figures of compiled steps, and close enough that a wrong factor is noticed."""

import dataclasses
import functools
import math

import jax
import pytest
from support import arguments

from trainer.aot.chips import CHIPS
from trainer.aot.compilation import compile_step
from trainer.aot.roofline import estimate
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.planning import bounds as module
from trainer.planning.bounds import Bounds
from trainer.training.build import build

FREE = {"ici_bandwidth": math.inf, "dcn_bandwidth": math.inf}
COMPUTE = dataclasses.replace(CHIPS["v5e"], hbm_bandwidth=math.inf, **FREE)
# The loop's saved activations dominate the step's memory, and its products the step's compute.
DEEP = {"base_num_decoder_layers": 48, "base_emb_dim": 64, "base_mlp_dim": 64, "head_dim": 16, "base_num_kv_heads": 4}
DEEP |= {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2, "per_device_batch_size": 8, "remat_policy": "full"}
SPARSE = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 32}
SPARSE |= {"sparse_matmul": False, "capacity_factor": 0.5, "ici_expert_parallelism": 4}
# Per case: settings, and the minimum of bound / compiled figure for arguments, memory and compute.
POINTS = {
    "deep": (DEEP, (0.99, 0.7, 0.9)),
    "microbatches": (DEEP | {"gradient_accumulation_steps": 2, "grad_dtype": "bfloat16"}, (0.99, 0.8, 0.9)),
    "zero1": ({"ici_data_parallelism": 8, "shard_optimizer_over_data": True, "remat_policy": "none"}, (0.9, 0.1, 0.7)),
    "dropping": (SPARSE, (0.9, 0.1, 0.7)),
    "unrolled": ({"scan_layers": False, "remat_policy": "minimal", "ici_fsdp_parallelism": 8}, (0.9, 0.03, 0.7)),
}


def given(**overrides):
    return load(arguments("nnx", **overrides)).config


@pytest.mark.rest(covered_by="[microbatches]", cases=("deep", "zero1", "dropping", "unrolled"))
@pytest.mark.parametrize("name", POINTS)
def test_bounds_are_below_the_compiled_step(name):
    settings, least = POINTS[name]
    config = given(**settings)
    bound = Bounds(jax.devices(), chip=COMPUTE).of(config)
    run = build(config, jax.devices())
    _, report = compile_step(run, lambda: run.step.lower(*run.abstract_args()), 1)
    seconds = estimate(report.cost, COMPUTE, 8).seconds
    figures = report.memory.arguments, report.memory.peak, seconds
    shares = [one / other for one, other in zip(bound, figures, strict=True)]
    assert all(low <= share <= 1 for low, share in zip(least, shares, strict=True)), shares


def test_other_rows_tiles_and_meshes_use_what_is_known(monkeypatch):
    """A new Bounds object, which traces again, returns the same bounds."""
    bounds, more = Bounds(jax.devices(), chip=COMPUTE), {"base_num_decoder_layers": 2}
    first = bounds.of(given(**DEEP | more))
    changes = {"per_device_batch_size": 2, "num_vocab_tiling": 2, "gradient_accumulation_steps": 3}
    others = [
        given(**DEEP | more | changes),
        given(**DEEP | more | {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 4}),
    ]
    anew = [Bounds(jax.devices(), chip=COMPUTE).of(config) for config in others]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_loops_of", None)
        assert [bounds.of(config) for config in others] == anew
    assert first.seconds == pytest.approx(anew[0].seconds * 4 / 3)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_only_what_a_memory_of_the_chip_may_hold_is_left_out(platform, monkeypatch):
    """On a TPU, the compiler may place 160 MiB in memories other than HBM."""
    bounds = Bounds(jax.devices())
    state, loops = module._State(100, 1.0, 0, 40, True), module._Loops(kept=(2e9, 6e9), gradients=(300, 800))
    monkeypatch.setattr(bounds, "_state", lambda config: state)
    monkeypatch.setattr(bounds, "_of_loops", lambda config: loops)
    monkeypatch.setattr(bounds, "_devices", [_Device(platform)] * 8)
    monkeypatch.setattr(module, "hardware", lambda devices: {"device_count": 8, "platform": "cpu"})
    monkeypatch.setattr(module, "memory_kinds", lambda devices: [])
    found = bounds.of(given(per_device_batch_size=2, gradient_accumulation_steps=2))
    beside = 160 * 2**20 if platform == "tpu" else 0
    assert found[:2] == (132, 132 + 16 * 10**9 + 100 + 40 - beside)


def test_a_loop_begins_while_the_gradients_of_later_ones_live():
    loops = module._Loops(kept=(10.0, 1.0), gradients=(7, 2))
    assert (loops.live(2, 1), loops.live(2, 3)) == (20 + 7 + 2, 20 + 7)
    assert module._Loops(kept=(10.0, 4.0), gradients=(7, 2)).live(2, 3) == 28 + 2


class _Device:
    def __init__(self, platform):
        self.platform = platform


@functools.cache
def bounds_of_a_model():
    bounds = Bounds(jax.devices())
    bounds.of(given())
    return bounds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ici_fsdp_parallelism": 3}, "ici_fsdp_parallelism"),
        ({"per_device_batch_size": 0.3}, "per_device_batch_size=0.3"),
        ({"remat_policy": "custom", "custom_device_tensors": ["nothing"]}, "does not declare nothing"),
        ({"ici_tensor_parallelism": 8}, "base_num_query_heads=4"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(UserError, match=message):
        bounds_of_a_model().of(given(**changes))
