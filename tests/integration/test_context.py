"""Context parallelism: a step with rows split over devices has the same loss, gradients and sown values as without."""

import functools

import pytest
from pipeline_cases import PER_STAGE, STAGES, assert_equal_gradients, made
from support import ALL_COMBINATIONS, EVERY_MATRIX, lowered_update

from trainer.aot.cost import analyze

CONTEXT, ULYSSES = "ici_context_parallelism", "ici_context_usp_ulysses_parallelism"
STRATEGY, BALANCE = "context_parallel_strategy", "context_parallel_load_balance"
RING = {CONTEXT: 4, STRATEGY: "ring"}
DENSE = {"base_num_decoder_layers": 2, "use_qk_clip": True}
DROPPING = {"dropout_rate": 0.1, "attention_dropout_rate": 0.1, "enable_dropout": True}
MIXTRAL = {
    "decoder_block": "mixtral",
    "base_moe_mlp_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "load_balance_loss_weight": 0.01,
    "use_qk_clip": True,
}
DEEPSEEK = {
    **EVERY_MATRIX,
    "first_num_dense_layers": 0,
    "base_num_decoder_layers": 2,
    "mtp_num_layers": 2,
    "use_qk_clip": True,
    "load_balance_loss_weight": 0.01,
}
GEMMA2 = {"decoder_block": "gemma2", "sliding_window_size": 4}
GPT3 = {"decoder_block": "gpt3", "fused_qkv": True, "base_num_kv_heads": 4, "trainable_position_size": 16}
# Per case: the keys of both runs, and the additional keys of the run with context parallelism.
CASES = {
    "ring": (DENSE, RING),
    "ring, in order": (DENSE | DROPPING, RING | {BALANCE: False}),
    "gathered": (DENSE, {CONTEXT: 8, "attention": "blockwise"}),
    "gathered, dot product": (DENSE | DROPPING, {CONTEXT: 2, BALANCE: False, "remat_policy": "minimal_with_context"}),
    "ulysses, tensor": (DENSE, {CONTEXT: 2, STRATEGY: "ulysses", "ici_tensor_parallelism": 2}),
    "usp": (DENSE | DROPPING, {CONTEXT: 2, ULYSSES: 4, STRATEGY: "usp", BALANCE: False}),
    "experts": (MIXTRAL, RING | {CONTEXT: 2, "ici_expert_parallelism": 2}),
    "multi-token prediction": (DEEPSEEK, RING),
    "patterns, tiling": (GEMMA2, RING | {"num_vocab_tiling": 4}),
    "learned positions": (GPT3, {CONTEXT: 2, STRATEGY: "ulysses", "ici_tensor_sequence_parallelism": 2}),
    "zero-1, accumulation": (
        DENSE,
        RING
        | {
            "ici_data_parallelism": 2,
            "shard_optimizer_over_data": True,
            "gradient_accumulation_steps": 2,
            "per_device_batch_size": 1,
        },
    ),
    "pipeline": (DENSE | {"base_num_decoder_layers": 4}, {CONTEXT: 2, STRATEGY: "ring", STAGES: 2, PER_STAGE: 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_maxima(case):
    model, keys = CASES[case]
    assert_equal_gradients(model, keys, tolerance=1e-5, rounded=("key/bias",))


EVERYTHING = MIXTRAL | {
    CONTEXT: 2,
    ULYSSES: 2,
    STRATEGY: "usp",
    "base_num_decoder_layers": 2,
    "ema_decay": 0.9,
    "gradient_accumulation_steps": 2,
    "per_device_batch_size": 1,
    "remat_policy": "full",
}


@functools.cache
def text(combination):
    return lowered_update(made(combination, **EVERYTHING)).as_text()


@pytest.mark.parametrize("combination", ALL_COMBINATIONS[1:])
def test_all_combinations_have_the_same_program(combination):
    assert text(combination) == text(ALL_COMBINATIONS[0])


def test_a_ring_whose_result_is_kept_does_not_run_again():
    """A rerun of the ring's forward pass would send keys and values three more times."""
    sent = {}
    for policy in ("full", "minimal_with_context"):
        run = made(**RING, base_num_decoder_layers=1, remat_policy=policy, opt_type="sgd")
        found = analyze(run.compile().as_text(), run.mesh).collectives
        sent[policy] = sum(it.count for it in found if (it.kind, it.dtype) == ("collective-permute", "f32"))
    assert sent["full"] - sent["minimal_with_context"] == 2 * 3
