"""The whole training step with the fused kernels, lowered on a CPU mesh for absent platforms."""

import functools
import importlib
import itertools
import re

import jax
import pytest
from support import ALL_COMBINATIONS, arguments

from trainer import sharding
from trainer.config.load import load
from trainer.config.resolve import resolve

# The package exports a function with the same name as the module.
building = importlib.import_module("trainer.training.build")

SIZES = {
    "attention": "flash",
    "dtype": "bfloat16",
    "max_target_length": 128,
    "head_dim": 64,
    "ici_data_parallelism": 1,
    "ici_fsdp_parallelism": 4,
    "ici_tensor_parallelism": 2,
    # this optimizer has no kernel
    "opt_type": "sgd",
    "gradient_clipping_threshold": 0,
}
LOWERED_AS = {"tpu": "tpu", "gpu": "cuda"}
# Patterns of the kernels' calls in the lowered program.
CALL = {"tpu": r'kernel_name = "splash_mha_([a-z]+)_', "gpu": r"custom_call @__cudnn\$fmha(\w+)\("}
FORWARD = {"tpu": ["fwd"], "gpu": ["ScaleBiasSoftmax"]}
BACKWARD = {"tpu": ["dkv", "dq"], "gpu": ["ScaleBiasSoftmaxBackward"]}


@functools.cache
def lowered(combination, platform, capability=None, **overrides):
    """Returns the lowered update of a combination, resolved for a platform with eight devices of a CUDA capability."""

    def resolve_elsewhere(config, **here):
        return resolve(config, **here | {"platform": platform})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "resolve", resolve_elsewhere)
        if capability:
            patch.setattr(sharding, "capability_of_mesh", lambda: capability)
        run = building.build(load(arguments(combination, **SIZES | overrides)).config, jax.devices())
        assert (run.mesh.shape["fsdp"], run.mesh.shape["tensor"]) == (4, 2)
        state, *others = run.abstract_args()
        update = jax.jit(run.computation.update).trace(run.codec.unpack(state), *others)
        return update.lower(lowering_platforms=(LOWERED_AS[platform],)).as_text()


def kernels(combination, platform, capability=None, **keys):
    """Returns the kernel calls in the lowered update."""
    return sorted(re.findall(CALL[platform], lowered(combination, platform, capability, **keys)))


# Both platforms, with a loop and with unrolled layers, each with another combination, because all combinations have the
# same program (tests/integration/test_five_combinations.py).
CASES = [
    (ALL_COMBINATIONS[i % len(ALL_COMBINATIONS)], platform, scan_layers)
    for i, (platform, scan_layers) in enumerate(itertools.product(CALL, (True, False)))
]


@pytest.mark.parametrize(("combination", "platform", "scan_layers"), CASES)
def test_the_step_lowers_with_the_platforms_kernel(combination, platform, scan_layers):
    found = kernels(combination, platform, scan_layers=scan_layers, base_num_decoder_layers=1, remat_policy="none")
    assert found == sorted(FORWARD[platform] + BACKWARD[platform])


OFFLOADED = {"remat_policy": "custom", "context": "offload"}


@pytest.mark.parametrize(
    ("platform", "keys", "forward_runs"),
    [
        ("tpu", {"remat_policy": "minimal"}, 2),
        ("tpu", {"remat_policy": "minimal_with_context"}, 1),
        ("gpu", {"remat_policy": "minimal"}, 2),
        ("gpu", {"remat_policy": "minimal_with_context"}, 1),
        ("gpu", {"remat_policy": "save_dot_with_context_except_mlp", "scan_layers": False}, 1),
        ("gpu", OFFLOADED, 1),
    ],
)
def test_context_spares_the_second_run_of_the_forward_kernel(platform, keys, forward_runs):
    unrolled = 2 if "scan_layers" in keys else 1  # unrolled, each of the two layers has its kernels
    found = kernels(ALL_COMBINATIONS[0], platform, **keys)
    assert found == sorted((FORWARD[platform] * forward_runs + BACKWARD[platform]) * unrolled)


def test_rows_of_one_document_need_no_bias():
    found = kernels(ALL_COMBINATIONS[0], "gpu", packing=False, remat_policy="none")
    assert found == ["Softmax", "SoftmaxBackward"]


@pytest.mark.parametrize(("capability", "name"), [((8, 0), "ScaleBiasSoftmax"), ((9, 0), "Softmax")])
def test_a_bound_of_documents_spares_the_bias_from_hopper_on(capability, name):
    found = kernels(ALL_COMBINATIONS[0], "gpu", capability, remat_policy="none")  # up to four documents per row
    assert found == [name, f"{name}Backward"]


def test_cudnn_is_one_program_in_the_first_and_the_last_combination():
    first, last = (lowered(ALL_COMBINATIONS[i], "gpu", None, **OFFLOADED) for i in (0, -1))
    assert first == last


@pytest.mark.parametrize("platform", CALL)
def test_qk_clip_runs_beside_the_kernels(platform):
    found = kernels(ALL_COMBINATIONS[0], platform, remat_policy="minimal_with_context", use_qk_clip=True)
    assert found == kernels(ALL_COMBINATIONS[0], platform, remat_policy="minimal_with_context")


def test_the_keys_of_splash_reach_its_kernels():
    tiles = {"max_target_length": 256, "sa_block_kv_dkv": 128, "sa_use_fused_bwd_kernel": True}
    assert kernels(ALL_COMBINATIONS[0], "tpu", **tiles) == ["dkv", "fwd"]  # without dq
