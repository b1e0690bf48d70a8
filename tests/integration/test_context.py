"""Context parallelism: a step with rows split over devices has the same loss, gradients and sown values as without."""

import pytest
from pipeline_cases import PER_STAGE, STAGES, assert_equal_gradients, made
from support import EVERY_MATRIX, lowered_gradients

from trainer.aot.cost import analyze

CONTEXT, ULYSSES = "ici_context_parallelism", "ici_context_usp_ulysses_parallelism"
STRATEGY, BALANCE = "context_parallel_strategy", "context_parallel_load_balance"
RING = {CONTEXT: 2, STRATEGY: "ring"}
DENSE = {"use_qk_clip": True}
AHEAD = DENSE | {"mtp_num_layers": 1}
DROPPING = {"attention_dropout_rate": 0.1, "enable_dropout": True}
DEEPSEEK = EVERY_MATRIX | {
    "first_num_dense_layers": 0,
    "base_num_decoder_layers": 1,
    "use_qk_clip": True,
    "load_balance_loss_weight": 0.01,
}
GEMMA2 = {"decoder_block": "gemma2", "sliding_window_size": 4, "base_num_decoder_layers": 2}
GPT3 = {"decoder_block": "gpt3", "fused_qkv": True, "trainable_position_size": 16, "base_num_decoder_layers": 2}
GPT3 |= {"base_num_query_heads": 8, "base_num_kv_heads": 8}
BY_HEADS = {CONTEXT: 2, STRATEGY: "ulysses", "ici_tensor_parallelism": 2, "ici_tensor_sequence_parallelism": 2}
ZERO1 = {"ici_data_parallelism": 2, "shard_optimizer_over_data": True}
# Per case: the keys of both runs, and the additional keys of the run with context parallelism.
CASES = {
    "gathered, rematerialized, multi-token prediction": (
        AHEAD,
        {CONTEXT: 8, "attention": "blockwise", "remat_policy": "minimal_with_context"},
    ),
    "usp in order": (DROPPING, {CONTEXT: 2, ULYSSES: 4, STRATEGY: "usp", BALANCE: False}),
    "ring, experts, latent attention": (DEEPSEEK, RING | {"ici_expert_parallelism": 2}),
    "ring, patterns, tiling, zero-1, accumulation": (
        GEMMA2,
        RING | ZERO1 | {"num_vocab_tiling": 4, "gradient_accumulation_steps": 2, "per_device_batch_size": 1},
    ),
    "ulysses, tensor, learned positions": (GPT3, BY_HEADS),
    "ring, pipeline": (DENSE, RING | {STAGES: 2, PER_STAGE: 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_maxima(case):
    model, keys = CASES[case]
    assert_equal_gradients(model, keys, tolerance=1e-5, rounded=("key/bias",))


def test_a_ring_whose_result_is_kept_does_not_run_again():
    """A rerun of the ring's forward pass would send keys and values three more times."""
    sent = {}
    for policy in ("full", "minimal_with_context"):
        run = made(**RING | {CONTEXT: 4}, base_num_decoder_layers=1, remat_policy=policy)
        found = analyze(lowered_gradients(run).compile().as_text(), run.mesh).collectives
        sent[policy] = sum(it.count for it in found if (it.kind, it.dtype) == ("collective-permute", "f32"))
    assert sent["full"] - sent["minimal_with_context"] == 2 * 3
