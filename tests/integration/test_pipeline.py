"""A training step with pipeline parallelism: its loss, gradients and sown values, its program and its collectives."""

import functools
import itertools

import numpy as np
import pytest
from pipeline_cases import DELAY, LAYERS, ONCE, PER_REPEAT, PER_STAGE, STAGES, M, assert_equal_gradients, made, measured
from support import ALL_COMBINATIONS, EVERY_MATRIX, lowered_gradients

from trainer.aot.cost import analyze
from trainer.models.families import stacks

DENSE = {"dropout_rate": 0.1, "enable_dropout": True}
MIXTRAL = {
    "decoder_block": "mixtral",
    "base_moe_mlp_dim": 16,
    "base_num_decoder_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "load_balance_loss_weight": 0.01,
    "use_qk_clip": True,
}
DEEPSEEK = {
    **EVERY_MATRIX,
    "base_num_decoder_layers": 6,
    "mtp_num_layers": 1,
    "use_qk_clip": True,
    "load_balance_loss_weight": 0.01,
}
QWEN2 = {"decoder_block": "qwen2"}
GEMMA2 = {"decoder_block": "gemma2", "sliding_window_size": 4}
TENSOR = {"ici_tensor_parallelism": 2}
EXPERT = {"ici_expert_parallelism": 2}
SEQUENCE = {"ici_tensor_sequence_parallelism": 2, "num_vocab_tiling": 4}
# Per case: the keys of both runs, which have packed rows and dropout, and the additional keys of the pipeline run.
CASES = {
    "tensor": (DENSE | TENSOR, {STAGES: 2, M: 4}),
    "zero-1, delay": (
        DENSE,
        {
            STAGES: 2,
            "ici_data_parallelism": 2,
            "shard_optimizer_over_data": True,
            DELAY: True,
            "remat_policy": "full",
            PER_STAGE: 2,
        },
    ),
    "experts, layers outside": (MIXTRAL | DENSE, EXPERT | {STAGES: 2, LAYERS: 2}),
    "deepseek, multi-token prediction": (DEEPSEEK | EXPERT, {STAGES: 2, M: 4, LAYERS: 4}),
    "four stages, once": (DENSE, {STAGES: 4, M: 8, ONCE: True, "remat_policy": "minimal"}),
    "per repeat": (DENSE, {STAGES: 2, M: 4, PER_REPEAT: True, "remat_policy": "full"}),
    "per repeat, unrolled": (
        DENSE,
        {STAGES: 2, M: 4, PER_REPEAT: True, PER_STAGE: 2, "scan_pipeline_iterations": False},
    ),
    "rematerialized layers": (
        DENSE,
        {
            STAGES: 2,
            PER_STAGE: 2,
            "scan_layers_per_stage": True,
            "remat_policy": "full",
            "set_remat_policy_on_layers_per_stage": True,
        },
    ),
    "sequence": (DENSE | SEQUENCE, {STAGES: 2}),
    "two axes of fsdp": (DENSE, {STAGES: 2, "ici_fsdp_transpose_parallelism": 2, "scan_layers": False}),
    "patterns": (GEMMA2, {STAGES: 2, PER_STAGE: 2}),
    "biases": (QWEN2, {STAGES: 4}),
}


@pytest.mark.rest(
    covered_by="experts, layers outside; fp8; the pipeline in integration/test_context.py",
    cases=(
        "tensor",
        "zero-1, delay",
        "deepseek, multi-token prediction",
        "four stages, once",
        "per repeat",
        "per repeat, unrolled",
        "rematerialized layers",
        "sequence",
        "two axes of fsdp",
        "patterns",
        "biases",
    ),
)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(name):
    model, keys = CASES[name]
    # Adding one vector to all keys changes no attention weight, so the gradient of a key's bias is 0 except for
    # rounding.
    found = assert_equal_gradients(model, keys, rounded=("key/bias",))
    layers = sum(stack.layers for stack in stacks(made(**model).config))
    sown = [value for name, value in found.items() if name.startswith("decoder/") and name.endswith("/max_logit")]
    assert sum(map(len, sown)) == layers


@pytest.mark.rest(covered_by="fp8", cases=("int8",))
@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_quantized_products(quantization):
    """The quantized operands saved for the backward pass have the right values, and bubbles cause no NaN.

    Each microbatch may have its own scales, hence the tolerances.
    """
    loss, found = measured(made(quantization=quantization, **{STAGES: 2, M: 4}, gradient_accumulation_steps=2))
    whole = {"per_device_batch_size": 4, "remat_policy": "minimal_with_quantization"}
    same, expected = measured(made(quantization=quantization, **whole))
    assert loss == pytest.approx(same, rel=0.01)
    for name, array in expected.items():
        assert np.linalg.norm(array) > 0
        assert np.linalg.norm(found[name] - array) < 0.1 * np.linalg.norm(array), name


EVERYTHING = {**MIXTRAL, STAGES: 2, LAYERS: 2, "remat_policy": "full", "ici_context_parallelism": 2}
PROGRAMS = {
    "unrolled": {STAGES: 4, M: 8, DELAY: True, "scan_pipeline_iterations": False, PER_STAGE: 1},
    "everything": EVERYTHING,
    "per repeat": {STAGES: 2, PER_REPEAT: True, "num_vocab_tiling": 2},
}


@functools.cache
def text(name, combination):
    return lowered_gradients(made(combination, **PROGRAMS[name])).as_text()


@pytest.mark.rest(covered_by="everything", cases=("unrolled", "per repeat"))
@pytest.mark.parametrize(("combination", "name"), list(itertools.product(ALL_COMBINATIONS[1:], PROGRAMS)))
def test_all_combinations_have_the_same_program(combination, name):
    assert text(name, combination) == text(name, ALL_COMBINATIONS[0])


# The matrices of a layer: four of attention, three of the MLP. The table is smaller than each layer's matrices.
MATRICES, TABLE = 7, 16 * 16 * 4
QUEUE = {STAGES: 2, M: 4, "base_num_decoder_layers": 8, "vocab_size": 16, "remat_policy": "full"}


@pytest.mark.rest(covered_by="a queue; per repeat", cases=("no queue", "once"))
@pytest.mark.parametrize(
    ("keys", "permutes", "gathers"),
    [
        # Per iteration: a result for the next stage, a waiting result, and a result of the last stage; twice for the
        # backward pass.
        ({}, 6, lambda plan: 2 * MATRICES * plan.iterations),
        # No results wait.
        ({M: 2}, 4, lambda plan: 2 * MATRICES * plan.iterations),
        ({ONCE: True}, 6, lambda plan: MATRICES),
        # Each matrix once per part of the iterations, and again in the backward pass of each part but the last.
        ({PER_REPEAT: True}, 6, lambda plan: MATRICES * (2 * (plan.repeats + 1) - 1)),
    ],
    ids=["a queue", "no queue", "once", "per repeat"],
)
def test_what_moves(keys, permutes, gathers):
    run = made(**QUEUE | keys, per_device_batch_size=4)
    plan = stacks(run.config)[0].pipeline
    found = analyze(lowered_gradients(run).compile().as_text(), run.mesh).collectives
    between = [each for each in found if "stage" in each.axes]
    microbatch = run.rows // plan.microbatches * run.config.max_target_length * run.config.base_emb_dim * 4
    moved = [each for each in between if each.kind == "collective-permute"]
    assert {each.size for each in moved} == {microbatch // 4}  # sharded over fsdp=4
    expected = permutes * plan.iterations
    assert expected - permutes // 2 <= sum(each.count for each in moved) <= expected  # fewer if the last are unused
    # The other collectives move only context fields, scalars, and data outside of the pipeline: the table and the last
    # norm.
    others = [each for each in between if each.kind != "collective-permute" and each.dtype not in ("s32", "pred")]
    assert {each.kind for each in others} == {"all-reduce"}
    assert sum(each.count * each.size for each in others) < 2 * TABLE
    of_fsdp = [each for each in found if (each.kind, each.dtype, each.axes) == ("all-gather", "f32", ("fsdp",))]
    assert sum(each.count for each in of_fsdp) == gathers(plan) + 1  # plus one for the table


@pytest.mark.rest(covered_by="what moves with AdamW")
def test_an_optimizer_moves_no_matrix_between_stages():
    """Muon works on matrices, which it stacks along one axis; AdamW works elementwise."""
    permutes = {}
    for optimizer in ("adamw", "muon"):
        run = made(**QUEUE | {"opt_type": optimizer}, per_device_batch_size=4)
        found = analyze(run.compile().as_text(), run.mesh).collectives
        permutes[optimizer] = sum(it.count for it in found if "stage" in it.axes and it.kind == "collective-permute")
    assert permutes["muon"] == permutes["adamw"] > 0
