"""Closed forms of FLOPs against sums by hand, the model itself and published sizes."""

import math
import subprocess
import sys

import jax
import pytest
from ml_collections import ConfigDict
from support import packed_batch, tiny_config

from trainer.backends.registry import make_model
from trainer.models import FAMILIES as BLOCKS
from trainer.models.families import family
from trainer.models.flops import flops_per_token, forward_flops_per_token, visible_keys
from trainer.models.qwen3_next.block import forward_flops
from trainer.objectives.base import prepared
from trainer.objectives.next_token import NextToken
from trainer.objectives.registry import make_objective

TINY = {
    "decoder_block": "llama2",
    "base_emb_dim": 8,
    "base_num_query_heads": 6,
    "base_num_kv_heads": 2,
    "head_dim": 4,
    "base_mlp_dim": 10,
    "base_num_decoder_layers": 3,
    "vocab_size": 11,
    "mlp_activations": ["silu", "linear"],
    "max_target_length": 16,
    "logits_via_embedding": True,
    "use_qk_norm": False,
    "attention_type": "global",
    "sliding_window_size": 0,
    "mtp_num_layers": 0,
    "num_experts": 1,
}
LLAMA2_7B = TINY | {
    "base_emb_dim": 4096,
    "base_num_query_heads": 32,
    "base_num_kv_heads": 32,
    "head_dim": 128,
    "base_mlp_dim": 11008,
    "base_num_decoder_layers": 32,
    "vocab_size": 32000,
    "mlp_activations": ["silu", "linear"],
    "max_target_length": 4096,
    "logits_via_embedding": False,
}
LLAMA3_8B = LLAMA2_7B | {"base_num_kv_heads": 8, "base_mlp_dim": 14336, "vocab_size": 128256, "max_target_length": 8192}

# One tiny block: query 8 x 24, key and value 8 x 8 each, out 24 x 8, gate, up and down 8 x 10 each.
BLOCK = 192 + 64 + 64 + 192 + 80 + 80 + 80


def tiny(**changes):
    return ConfigDict(TINY | changes)


@pytest.mark.parametrize("tied", [True, False])
def test_forward_flops(tied):
    # Products with parameters including the head; then scores and values: 2 x 2 x 6 heads x 4 x 16 tokens, halved by
    # the mask.
    expected = 2 * (3 * BLOCK + 8 * 11) + 3 * (2 * 2 * 6 * 4 * 16) / 2
    assert forward_flops_per_token(tiny(logits_via_embedding=tied)) == expected


def test_training_is_three_forward_passes():
    assert flops_per_token(tiny()) == 6 * (3 * BLOCK + 8 * 11) + 6 * 3 * 6 * 4 * 16


def test_llama2_7b_flops():
    # 6 x (all parameters - embedding table - norms) + 6 x 32 layers x 4096 x 4096 tokens
    expected = 6 * (6738415616 - 32000 * 4096 - 65 * 4096) + 6 * 32 * 4096 * 4096
    assert flops_per_token(ConfigDict(LLAMA2_7B)) == expected


def test_an_ungated_mlp_has_one_input_projection():
    assert forward_flops_per_token(tiny()) - forward_flops_per_token(tiny(mlp_activations=["gelu"])) == 2 * 3 * 80


def test_norms_of_heads_add_no_flops():
    assert flops_per_token(tiny(use_qk_norm=True)) == flops_per_token(tiny())


@pytest.mark.parametrize("window", [1, 4, 15, 16, 40])
def test_a_window_counts_the_keys_that_its_mask_shows(window):
    """By convention, the diagonal counts half for queries whose window is cut by the start of the row."""
    length = 16
    shown = sum(1 for query in range(length) for key in range(length) if 0 <= query - key < window) / length
    reach = min(window, length)
    config = tiny(attention_type="local_sliding", sliding_window_size=window)
    assert visible_keys(config) == pytest.approx(shown - reach / (2 * length))
    assert flops_per_token(tiny()) - flops_per_token(config) == pytest.approx(12 * 3 * 24 * (8 - visible_keys(config)))


@pytest.mark.parametrize("chunk", [1, 5, 8, 16, 40])
def test_chunks_count_the_keys_that_their_mask_shows(chunk):
    """The diagonal counts half by convention. Every second layer sees the whole row."""
    length = 16
    shown = sum(1 for query in range(length) for key in range(query + 1) if key // chunk == query // chunk) / length
    experts = {"num_experts": 2, "base_moe_mlp_dim": 16, "shared_experts": 1, "base_num_decoder_layers": 2}
    config = tiny(decoder_block="llama4", chunk_attn_window_size=chunk, nope_layer_interval=2, **experts)
    assert visible_keys(config) == pytest.approx((shown - 0.5 + 8) / 2)


def test_a_window_says_nothing_under_global_attention():
    assert visible_keys(tiny(sliding_window_size=4)) == 8


def test_an_op_that_computes_more_than_it_shows_is_counted_by_its_keys():
    whole = flops_per_token(tiny(), keys=16)
    assert whole - flops_per_token(tiny()) == 12 * 3 * 24 * 8


@pytest.mark.parametrize("block", BLOCKS)
def test_every_family_of_the_trainer_counts_attention(block):
    """The default count, which a user's block gets from its parameters, omits attention."""
    count = forward_flops if block in ("qwen3_5", "qwen3_5_moe", "qwen3_next") else forward_flops_per_token
    assert family(block).forward_flops is count


# Wide enough that norms and other operations that the convention omits are negligible.
WIDE = {
    "base_emb_dim": 256,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 128,
    "base_mlp_dim": 512,
    "vocab_size": 512,
    "max_target_length": 128,
    "attention": "dot_product",
    "scan_layers": False,
    "remat_policy": "none",
}
FAMILIES = {
    "llama2": {"logits_via_embedding": False},
    "llama2, tied": {"logits_via_embedding": True},
    "llama2, ungated": {"logits_via_embedding": False, "mlp_activations": "gelu"},
    "llama2, as many key as query heads": {"base_num_kv_heads": 4},
    "mistral with a window": {
        "decoder_block": "mistral",
        "logits_via_embedding": False,
        "attention_type": "local_sliding",
        "sliding_window_size": 32,
    },
    "qwen3 with norms of heads": {"decoder_block": "qwen3", "use_qk_norm": True, "normalize_embedding_logits": False},
    # Every token chooses every expert, because XLA's CPU backend computes all experts.
    "deepseek, with all experts": {
        "decoder_block": "deepseek",
        "attention_type": "mla",
        "base_num_kv_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "base_moe_mlp_dim": 256,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "shared_experts": 1,
        "first_num_dense_layers": 1,
        "sparse_matmul": False,
        "logits_via_embedding": False,
    },
    "qwen2 with biases": {"decoder_block": "qwen2", "attention_bias": True, "logits_via_embedding": False},
    "gemma2, tied": {
        "decoder_block": "gemma2",
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "sliding_window_size": 32,
        "attn_logits_soft_cap": 50.0,
        "final_logits_soft_cap": 30.0,
        "logits_via_embedding": True,
    },
    "gemma3 with a rest": {
        "decoder_block": "gemma3",
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "sliding_window_pattern": 2,
        "sliding_window_size": 32,
        "base_num_decoder_layers": 3,
        "logits_via_embedding": True,
    },
    "olmo3": {"decoder_block": "olmo3", "sliding_window_size": 32, "use_qk_norm": True, "logits_via_embedding": False},
    "gemma, tied": {"decoder_block": "gemma", "logits_via_embedding": True},
    "olmo2": {"decoder_block": "olmo2", "use_qk_norm": True, "logits_via_embedding": False},
    "smollm3": {"decoder_block": "smollm3", "nope_layer_interval": 2, "logits_via_embedding": False},
    "glm4": {
        **{"decoder_block": "glm4", "attention_bias": True, "use_post_attn_norm": True, "use_post_ffw_norm": True},
        **{"partial_rotary_factor": 0.5, "logits_via_embedding": False},
    },
    "granite": {
        **{"decoder_block": "granite", "logits_via_embedding": False, "embedding_multiplier": 3.0},
        **{"residual_multiplier": 0.7, "logits_multiplier": 0.3},
    },
    "phi3": {"decoder_block": "phi3", "partial_rotary_factor": 0.75, "logits_via_embedding": False},
    "qwen3, untied": {"decoder_block": "qwen3", "use_qk_norm": True, "logits_via_embedding": False},
    # Layers of Qwen3.5-2B, in which the recurrence is a small part. One chunk, because XLA counts a loop's body once.
    "qwen3_5": {
        **{"decoder_block": "qwen3_5", "use_qk_norm": True, "partial_rotary_factor": 0.25, "base_emb_dim": 2048},
        **{"inhomogeneous_layer_cycle_interval": 2, "base_num_decoder_layers": 2, "logits_via_embedding": False},
        **{"gdn_num_key_heads": 16, "gdn_num_value_heads": 16, "max_target_length": 64, "base_mlp_dim": 6144},
        **{"base_num_query_heads": 8, "head_dim": 256},
    },
}


def xla_flops(config, gradients: bool, compiled: bool = True) -> float:
    """Returns XLA's count of FLOPs per token of the loss and optionally its gradients, for the lowered or the compiled
    program. Nothing is allocated."""
    model = make_model(config)
    params, rest = model.abstract
    objective, rows = NextToken(model.apply), 2

    def loss(params, batch):
        return objective.sums(params, rest, batch, None).minimized["lm_loss"]

    lowered = jax.jit(jax.value_and_grad(loss) if gradients else loss).lower(params, packed_batch(config, rows))
    program = lowered.compile() if compiled else lowered
    return program.cost_analysis()["flops"] / (rows * config.max_target_length)


@pytest.mark.parametrize("case", FAMILIES)
def test_flops_of_a_family(case):
    """dot_product computes the whole square, with or without a window. Only the first case is compiled, with gradients:
    it shows that the compiler keeps the products, and that a step has three times the FLOPs."""
    config, first = tiny_config("nnx", **WIDE | FAMILIES[case]), case == next(iter(FAMILIES))
    expected = (3 if first else 1) * family(config.decoder_block).forward_flops(config, config.max_target_length)
    assert xla_flops(config, gradients=first, compiled=first) == pytest.approx(expected, rel=0.02)


SPARSE = {"num_experts": 8, "num_experts_per_tok": 3, "base_moe_mlp_dim": 128, "logits_via_embedding": False}
WITH_EXPERTS = {
    "mixtral": {"decoder_block": "mixtral"},
    "granite_moe": {"decoder_block": "granite_moe", "residual_multiplier": 0.7},
    "gpt_oss": {
        **{"decoder_block": "gpt_oss", "attention_bias": True, "mlp_activations_limit": 7.0},
        "sliding_window_size": 32,
    },
    "granite_moe_shared": {"decoder_block": "granite_moe_shared", "shared_experts": 2},
    "mistral4": {
        **{"decoder_block": "mistral4", "attention_type": "mla", "base_num_kv_heads": 4, "q_lora_rank": 64},
        **{"kv_lora_rank": 64, "shared_experts": 1, "first_num_dense_layers": 1, "norm_topk_prob": True},
    },
    "qwen3_moe": {
        "decoder_block": "qwen3_moe",
        "use_qk_norm": True,
        "interleave_moe_layer_step": 2,
        "base_num_decoder_layers": 4,
    },
    "deepseek": {
        "decoder_block": "deepseek",
        "attention_type": "mla",
        "base_num_kv_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "shared_experts": 2,
        "first_num_dense_layers": 1,
        "routed_score_func": "sigmoid",
        "routed_bias": True,
        "scan_layers": True,
        "mtp_num_layers": 1,
    },
    "glm4_moe": {
        **{"decoder_block": "glm4_moe", "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5},
        **{"shared_experts": 1, "first_num_dense_layers": 1, "routed_score_func": "sigmoid", "routed_bias": True},
        "mtp_num_layers": 1,
    },
    "llama4": {
        **{"decoder_block": "llama4", "use_qk_norm": True, "nope_layer_interval": 2, "interleave_moe_layer_step": 2},
        **{"chunk_attn_window_size": 32, "temperature_tuning": True, "base_num_decoder_layers": 4},
        "shared_experts": 1,
    },
}


def traced_flops(jaxpr) -> int:
    """Returns the FLOPs of the matrix products in a jaxpr. A grouped product of m rows counts 2 x m x k x n."""
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda it: hasattr(it, "eqns")):
            total += times * traced_flops(inner) if hasattr(inner, "eqns") else 0
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            sizes = [equation.invars[0].aval.shape[axis] for axis in contracted]
            total += 2 * equation.outvars[0].aval.size * math.prod(sizes)
        elif equation.primitive.name == "ragged_dot_general":
            total += 2 * equation.invars[0].aval.size * equation.outvars[0].aval.shape[-1]
    return total


@pytest.mark.parametrize("case", WITH_EXPERTS)
def test_only_the_experts_of_a_token_count(case):
    """Counts over the jaxpr, because XLA's CPU backend computes all experts. Gradients only of the first case."""
    config = tiny_config("nnx", **WIDE | SPARSE | WITH_EXPERTS[case])
    model = make_model(config)
    params, rest = model.abstract
    objective, rows = make_objective(config, model), 2

    def loss(params, rest, batch):
        return sum(term.sum() for term in objective.sums(params, rest, batch, None).minimized.values())

    batch = prepared(objective, packed_batch(config, rows))
    first = case == next(iter(WITH_EXPERTS))
    found = traced_flops(jax.make_jaxpr(jax.grad(loss) if first else loss)(params, rest, batch).jaxpr)
    expected = flops_per_token(config, keys=config.max_target_length) / (1 if first else 3)
    assert found / (rows * config.max_target_length) == pytest.approx(expected, rel=0.02)


def test_compiled_flops_of_blocks_under_a_window():
    """A block of 256 queries reads only its window's keys. The compiler counts the loop's body once, and there are two
    blocks.

    Forward only: in the backward pass the op recomputes its scores, which no convention of model FLOPs counts.
    """
    window = {"attention": "blockwise", "attention_type": "local_sliding", "sliding_window_size": 64}
    config = tiny_config("nnx", **WIDE | window | {"max_target_length": 512})
    expected = forward_flops_per_token(config, keys=(256 + 64 - 1) / 2)
    assert xla_flops(config, gradients=False) == pytest.approx(expected, rel=0.02)


def test_importing_it_loads_no_jax():
    subprocess.run(
        [sys.executable, "-c", "import trainer.models.flops, sys; assert 'jax' not in sys.modules"], check=True
    )


def test_a_module_of_multi_token_prediction_is_a_block_a_projection_and_the_head_again():
    one = tiny(mtp_num_layers=1)
    products = 2 * (BLOCK + 2 * 8 * 8 + 8 * 11) + (2 * 2 * 6 * 4 * 16) / 2
    assert forward_flops_per_token(one) - forward_flops_per_token(tiny()) == products
