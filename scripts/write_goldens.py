"""Writes tests/goldens: tiny random models of Hugging Face's transformers, and their results.

    pip install -e ".[goldens]" && python scripts/write_goldens.py [case ...]

Each case is a directory written by transformers' save_pretrained, with an additional file expected.npz: two batches,
their logits, and gradients of the mean cross entropy under transformers' names. The batch "rows" has one document per
row, masked by transformers itself. The batch "packed" has several documents per row, and padding. This script makes its
mask or, for models of `WHOLE_ROWS`, computes the documents one by one. "generated" has greedy continuations of the
first tokens of "rows", by transformers' generate, and for each new token the difference between the two largest logits.

mtp.npz, in the directory of the case "qwen3-5-moe" (`WITH_MODULE`), has a multi-token prediction module: its tensors,
named as in published checkpoints, and its logits for "rows". transformers' classes compute the logits from the
embeddings and hidden states of the case's model.

mxfp4.safetensors has MXFP4 matrices as in gpt-oss checkpoints, and the values to which transformers decodes them.

declarations.json has the types that transformers declares for the fields of each case's configuration.
"""

import copy
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, is_typeddict

os.environ["USE_HUB_KERNELS"] = "NO"  # use transformers' own Python code, even if kernels are installed

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens"
ROWS, LENGTH = 2, 20
PROMPT, CONTINUED = 7, 40
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
DEEPSEEK_V3 = (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM)
DEEPSEEK_V2 = (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM)
LLAMA4 = (transformers.Llama4TextConfig, transformers.Llama4ForCausalLM)
LLAMA = (transformers.LlamaConfig, transformers.LlamaForCausalLM)
MINISTRAL3 = (transformers.Ministral3Config, transformers.Ministral3ForCausalLM)
MISTRAL = (transformers.MistralConfig, transformers.MistralForCausalLM)
MISTRAL4 = (transformers.Mistral4Config, transformers.Mistral4ForCausalLM)
MIXTRAL = (transformers.MixtralConfig, transformers.MixtralForCausalLM)
PHI3 = (transformers.Phi3Config, transformers.Phi3ForCausalLM)
GLM = (transformers.GlmConfig, transformers.GlmForCausalLM)
GLM4_MOE = (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM)
GLM4_MOE_LITE = (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM)
GLM4 = (transformers.Glm4Config, transformers.Glm4ForCausalLM)
GRANITE = (transformers.GraniteConfig, transformers.GraniteForCausalLM)
GRANITE_MOE = (transformers.GraniteMoeConfig, transformers.GraniteMoeForCausalLM)
GRANITE_MOE_SHARED = (transformers.GraniteMoeSharedConfig, transformers.GraniteMoeSharedForCausalLM)
GRANITE4 = (transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM)
QWEN3 = (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)
QWEN3_MOE = (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM)
QWEN2 = (transformers.Qwen2Config, transformers.Qwen2ForCausalLM)
GEMMA = (transformers.GemmaConfig, transformers.GemmaForCausalLM)
GEMMA2 = (transformers.Gemma2Config, transformers.Gemma2ForCausalLM)
GEMMA3 = (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM)
OLMO2 = (transformers.Olmo2Config, transformers.Olmo2ForCausalLM)
OLMO3 = (transformers.Olmo3Config, transformers.Olmo3ForCausalLM)
EXAONE4 = (transformers.Exaone4Config, transformers.Exaone4ForCausalLM)
GPT_OSS = (transformers.GptOssConfig, transformers.GptOssForCausalLM)
QWEN3_NEXT = (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM)
QWEN3_5 = (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM)
QWEN3_5_MOE = (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM)
SMOLLM3 = (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM)
# Smaller sizes, mainly for models with many layers: they keep each golden below 100 kB.
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": None,
}
OF_OLMO = {name: size for name, size in SMALL.items() if name != "head_dim"}
OF_OLMO |= {"num_key_value_heads": 2, "eos_token_id": None}
OF_PHI = {name: size for name, size in SMALL.items() if name != "head_dim"} | {"num_key_value_heads": 2}
OF_PHI |= {"bos_token_id": None, "eos_token_id": None}
OF_LLAMA4 = SMALL | {"intermediate_size": 10, "intermediate_size_mlp": 20}
OF_LLAMA4 |= {"num_local_experts": 3, "num_experts_per_tok": 2, "attention_chunk_size": 5, "floor_scale": 4}
OF_LLAMA4 |= {"attn_scale": 0.5, "bos_token_id": None, "eos_token_id": None}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1000.0, "long_factor": [1.0, 2.5, 4.0]}
OF_GRANITE = {name: size for name, size in SMALL.items() if name not in ("head_dim", "pad_token_id")}
OF_GRANITE |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
OF_GRANITE |= {"logits_scaling": 1.6, "eos_token_id": None}
OF_DELTA = SMALL | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4}
OF_DELTA |= {"linear_value_head_dim": 6, "linear_conv_kernel_dim": 3, "full_attention_interval": 2}
OF_DELTA |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}}
OF_DELTA_EXPERTS = OF_DELTA | {"moe_intermediate_size": 6, "shared_expert_intermediate_size": 12, "num_experts": 4}
OF_DELTA_EXPERTS |= {"num_experts_per_tok": 2, "experts_implementation": "eager"}
WITH_MODULE = "qwen3-5-moe"
FULL, SLIDING = "full_attention", "sliding_attention"
# Models whose positions or recurrent state, in transformers, span the whole row. Their packed documents are computed
# one by one.
WHOLE_ROWS = ("llama4_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# The gradients that are stored for cases that vary another case, for example in the RoPE type. Other gradients would
# test nothing new.
TURNED = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
EXPERTS = {
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "experts_implementation": "eager",
}


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "experts_implementation": "eager",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
OF_GLM = {name: size for name, size in SMALL.items() if name != "head_dim"} | {"num_mtp_layers": 0}
OF_GLM |= {"moe_intermediate_size": 10, "n_routed_experts": 6, "num_experts_per_tok": 3}
OF_GLM |= {"experts_implementation": "eager"}


OF_MISTRAL4 = {name: LATENT[name] for name in LATENT if name.endswith(("_rank", "_head_dim"))}
OF_MISTRAL4 |= {"hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 2}
OF_MISTRAL4 |= {"moe_intermediate_size": 10, "n_routed_experts": 6, "num_experts_per_tok": 3, "q_lora_rank": 10}
OF_MISTRAL4 |= {"experts_implementation": "eager", "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
OF_MISTRAL4["rope_parameters"] = {
    **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 6},
    **{"beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
}


class Case(NamedTuple):
    """A model and what to store of it.

    Attributes:
      family: its configuration class and its model class.
      config: fields of its configuration, in addition to SIZES.
      gradients: the name prefixes of the gradients to store; () stores all.
      spread: the standard deviation of a matrix's entries, times the square root of its input size. With a large
        spread, a deep model amplifies rounding errors by 100.
      scales: the range of the model's vectors, which are norm scales and biases.
    """

    family: tuple[Any, Any]
    config: dict[str, Any]
    gradients: tuple[str, ...] = ()
    spread: float = 1.5
    scales: tuple[float, float] = (0.5, 1.5)


def some(*attention: int) -> tuple[str, ...]:
    """Returns the name prefixes of the first layer and of the query projections of the layers with these indices."""
    return ("model.layers.0.", *(f"model.layers.{i}.self_attn.q_" for i in attention))


def rope_case(**rope: Any) -> Case:
    """Returns a Llama case with RoPE parameters. Its 8 unscaled wavelengths are 6.3, 19.9, 62.8, 199, ... tokens."""
    return Case(LLAMA, {"head_dim": 16, "rope_parameters": {"rope_theta": 10000.0, **rope}}, TURNED)


CASES = {
    "llama": Case(LLAMA, {"rms_norm_eps": 1e-5}),
    "llama-tied": Case(LLAMA, {"tie_word_embeddings": True}),
    "llama-linear": rope_case(rope_type="linear", factor=4.0),
    # Relative to the original length of 64 tokens, there are short, medium and long wavelengths.
    "llama-llama3": rope_case(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "llama-yarn": rope_case(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    "llama-yarn-exact": rope_case(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=4.0,
        beta_slow=0.5,
        truncate=False,
        attention_factor=1.0,
    ),
    "mistral": Case(MISTRAL, {"sliding_window": 5, "head_dim": 8}),
    "qwen3": Case(QWEN3, {"head_dim": 16}),
    "qwen3-tied": Case(QWEN3, {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": Case(MIXTRAL, {"num_local_experts": 4, "experts_implementation": "eager"}),
    "qwen3-moe": Case(QWEN3_MOE, EXPERTS | {"norm_topk_prob": False}),
    "deepseek-v2-lite": Case(DEEPSEEK_V2, LATENT),
    "deepseek-v2": Case(
        DEEPSEEK_V2,
        LATENT
        | {"q_lora_rank": 10, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}
        | {"routed_scaling_factor": 4.0},
    ),
    "deepseek-v3": Case(
        DEEPSEEK_V3,
        LATENT
        | {"q_lora_rank": 10, "n_group": 3, "topk_group": 2, "n_shared_experts": 1, "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.5},
    ),
    "qwen3-moe-interleaved": Case(
        QWEN3_MOE,
        EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 4},
        ("model.layers.1.mlp.gate.weight", "model.layers.2.mlp.up_proj.weight"),
    ),
    "qwen2": Case(QWEN2, SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}),
    "gemma": Case(GEMMA, SMALL | {"head_dim": 12}),
    # These caps are low enough to change scores and logits clearly.
    "gemma2": Case(
        GEMMA2,
        SMALL
        | {"num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 12}
        | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0},
        some(1, 2),
    ),
    # Seven layers: one period of six, and one layer more.
    "gemma3": Case(
        GEMMA3,
        SMALL
        | {"num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 12, "intermediate_size": 8}
        | {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            }
        },
        some(5, 6),
        spread=0.9,
        scales=(-0.5, 0.5),  # Gemma's norms add 1
    ),
    "olmo2": Case(OLMO2, OF_OLMO | {"num_attention_heads": 4}),
    "olmo3": Case(
        OLMO3,
        OF_OLMO
        | {"num_hidden_layers": 5, "sliding_window": 5}
        | {
            "rope_parameters": {
                FULL: {
                    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
                    **{"rope_theta": 10000.0, "beta_fast": 4.0, "beta_slow": 1.0},
                },
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
        some(3, 4),
    ),
    "smollm3": Case(SMOLLM3, SMALL | {"num_hidden_layers": 5}, some(3, 4), spread=0.9),
    "phi3": Case(PHI3, OF_PHI | {"sliding_window": 5}),
    # Every document with more than one token is longer than the original length of 6 tokens, so it uses the long
    # factors.
    "phi4-mini": Case(
        PHI3,
        OF_PHI
        | {"num_key_value_heads": 1, "tie_word_embeddings": True, "original_max_position_embeddings": 6}
        | {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.2]}},
        some(),
    ),
    "phi3-short": Case(
        PHI3,
        OF_PHI
        | {"original_max_position_embeddings": 64}
        | {"rope_parameters": LONGROPE | {"short_factor": [0.5, 1.2, 1.7, 3.0], "long_factor": [8.0] * 4}},
        ("model.layers.0.self_attn.qkv_proj.weight",),
    ),
    "glm4": Case(GLM4, SMALL | {"rms_norm_eps": 1e-5}, spread=0.9),
    "glm": Case(GLM, SMALL | {"attention_bias": False}, TURNED, spread=0.9),
    "glm4-moe": Case(
        GLM4_MOE,
        OF_GLM
        | {"head_dim": 8, "num_key_value_heads": 1, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5}
        | {"attention_bias": True, "use_qk_norm": True},
        (
            "model.layers.0.self_attn.",
            "model.layers.1.mlp.gate.",
            "model.layers.1.mlp.shared",
            "model.layers.1.mlp.experts.2.",
        ),
        spread=0.9,
    ),
    "glm4-moe-air": Case(GLM4_MOE, OF_GLM | {"head_dim": 8, "attention_bias": True}, TURNED, spread=0.9),
    "glm4-moe-lite": Case(
        GLM4_MOE_LITE,
        OF_GLM
        | {name: LATENT[name] for name in LATENT if name.endswith(("_rank", "_head_dim"))}
        | {"num_key_value_heads": 2, "q_lora_rank": 10, "mlp_layer_types": ["dense", "sparse", "sparse"]}
        | {"num_hidden_layers": 3},
        ("model.layers.0.self_attn.", "model.layers.2.mlp.gate."),
        spread=0.9,
    ),
    # The example family of docs/guides/extending.md.
    "exaone4": Case(
        EXAONE4, SMALL | {"num_hidden_layers": 5, "sliding_window": 5, "num_key_value_heads": 1}, some(3, 4), spread=0.9
    ),
    "granite": Case(GRANITE, OF_GRANITE),
    "granite-moe": Case(
        GRANITE_MOE,
        OF_GRANITE
        | {"num_local_experts": 5, "num_experts_per_tok": 3, "experts_implementation": "eager", "intermediate_size": 6},
    ),
    "granite4": Case(
        GRANITE4,
        OF_GRANITE
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 12, "mamba_n_heads": 1}
        | {"layer_types": ["attention"] * 2, "position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
    # Queries are scaled up from position 6 on, and further from 12 and 18 on.
    "ministral3": Case(
        MINISTRAL3,
        SMALL
        | {"bos_token_id": None, "eos_token_id": None, "sliding_window": 9}
        | {
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6, "rope_theta": 1000.0},
                **{"beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
                "llama_4_scaling_beta": 0.5,
            }
        },
    ),
    # Documents are longer than a chunk, and reach positions at which queries are scaled up.
    "llama4": Case(
        LLAMA4,
        OF_LLAMA4
        | {"num_hidden_layers": 5}
        | {
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 1.0, "original_max_position_embeddings": 64},
            }
        },
        some(3, 4),
        spread=0.9,
    ),
    "llama4-interleaved": Case(
        LLAMA4,
        OF_LLAMA4
        | {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2, "use_qk_norm": False},
        some(3),
        spread=0.9,
    ),
    # This limit clamps many activations of the experts.
    "gpt-oss": Case(
        GPT_OSS,
        SMALL
        | {"num_hidden_layers": 3, "sliding_window": 5, "swiglu_limit": 0.75, "num_local_experts": 4}
        | {"num_experts_per_tok": 3, "experts_implementation": "eager"}
        | {
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
                **{"rope_theta": 10000.0, "beta_fast": 4.0, "beta_slow": 1.0},
            }
        },
        some(1),
    ),
    # Queries are scaled up from position 6 on, and further from 12 and 18 on.
    "mistral4": Case(
        MISTRAL4,
        OF_MISTRAL4 | {"first_k_dense_replace": 1, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
        ("model.layers.0.self_attn.", "model.layers.1.mlp.gate.", "model.layers.1.mlp.shared"),
        spread=0.9,
    ),
    "mistral4-small": Case(MISTRAL4, OF_MISTRAL4 | {"q_lora_rank": None}, spread=0.9),
    "granite-moe-shared": Case(
        GRANITE_MOE_SHARED,
        OF_GRANITE
        | {"num_local_experts": 5, "num_experts_per_tok": 3, "experts_implementation": "eager", "intermediate_size": 6}
        | {"shared_intermediate_size": 12},
    ),
    # Three layers: a pair, of which only the second has experts, and the first layer of an incomplete pair.
    "llama4-rest": Case(
        LLAMA4,
        OF_LLAMA4 | {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2},
        some(2),
        spread=0.9,
    ),
    # These cases have a recurrent layer and one with attention; qwen3-5 has a third layer, a recurrent one. In a
    # recurrent layer, two value heads of size 6 share one head of queries and keys of size 4.
    "qwen3-next": Case(QWEN3_NEXT, OF_DELTA_EXPERTS, spread=1.0, scales=(-0.6, 0.6)),
    "qwen3-5-moe": Case(QWEN3_5_MOE, OF_DELTA_EXPERTS, (*some(0), "model.norm."), spread=1.0, scales=(-0.6, 0.6)),
    "qwen3-5": Case(
        QWEN3_5, OF_DELTA | {"num_hidden_layers": 3, "tie_word_embeddings": True}, spread=1.0, scales=(-0.6, 0.6)
    ),
}


def main() -> None:
    """Writes the cases that the command line names, or every case, and prints the size of each."""
    torch.set_num_threads(1)  # one thread adds in a fixed order
    transformers.utils.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    write_declarations()
    write_mxfp4()
    for seed, (name, case) in enumerate(CASES.items()):
        if name not in (sys.argv[1:] or CASES):
            continue
        folder = GOLDENS / name
        shutil.rmtree(folder, ignore_errors=True)
        model = random_model(case, seed)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        (folder / "model.safetensors").chmod(0o644)
        arrays = {}
        for kind, batch in {"rows": rows(seed), "packed": packed(seed)}.items():
            logits, gradients = computed(model, batch, masked=kind == "packed")
            if kind == "packed":
                check_mask(model, batch, logits)
            kept = {f"gradient/{n}": gradients[n] for n in gradients if n.startswith(case.gradients or "")}
            arrays |= {f"{kind}/{n}": array for n, array in (batch | {"logits": logits} | kept).items()}
        np.savez_compressed(folder / "expected.npz", **arrays, **generated(model, rows(seed)["inputs"]))
        if name == WITH_MODULE:
            np.savez_compressed(folder / "mtp.npz", **module(model, case, rows(seed)["inputs"]))
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, {size / 1e3:.0f} kB")


def module(model: Any, case: Case, inputs: np.ndarray) -> dict[str, Any]:
    """Returns the tensors of a random multi-token prediction module, and its logits [rows, length - 1, vocabulary]."""
    from transformers.modeling_layers import MtpLayer
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm

    config = copy.deepcopy(model.config)
    config.layer_types, config.num_hidden_layers = [FULL], 1
    layer = randomized(MtpLayer(config, Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm, 0).eval(), case, 1)
    tokens, count = torch.tensor(inputs, dtype=torch.long), inputs.shape[1] - 1
    position = torch.arange(count)[None]
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        logits = model.lm_head(
            layer(
                model.model.embed_tokens(tokens[:, 1:]),
                hidden,
                position_embeddings=model.model.rotary_emb(hidden, position[None].expand(3, 1, -1)),
                attention_mask=torch.full((count, count), float("-inf")).triu(1)[None, None],
                position_ids=position,
                cache=None,
            )
        )
    published = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    tensors = {"logits": logits.numpy()}
    for name, parameter in layer.named_parameters():
        first, _, rest = name.partition(".")
        tensors[f"mtp.{published.get(first, 'layers.0')}.{rest}"] = parameter.detach().numpy()
    return tensors


def write_declarations() -> None:
    """Writes, for each model type, the declared types of the fields of config.json, as type names joined by " | "."""
    found = {}
    for config in sorted({case.family[0] for case in CASES.values()}, key=lambda it: it.model_type):
        declared = {field.name: field.type for field in dataclasses.fields(config) if field.name in config().to_dict()}
        found[config.model_type] = {name: type_name(kind) for name, kind in sorted(declared.items())}
    (GOLDENS / "declarations.json").write_text(json.dumps(found, indent=0) + "\n")


def write_mxfp4() -> None:
    """Writes two matrices of random codes, with random scales over the range of bfloat16, and their values."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, 5, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 255, (2, 5, 3), generator=generator, dtype=torch.uint8)
    tensors = {"m_blocks": codes, "m_scales": scales, "values": convert_moe_packed_tensors(codes, scales)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, GOLDENS / "mxfp4.safetensors")


def type_name(kind: Any) -> str:
    """Returns the name of a type: "dict" for a TypedDict such as RoPE's, and "any" for a Literal."""
    if parts := [part for part in get_args(kind) if not isinstance(part, str)]:
        if get_origin(kind) in (list, dict):
            return "dict" if get_origin(kind) is dict else f"list[{type_name(parts[0])}]"
        return " | ".join(dict.fromkeys(type_name(part) for part in parts))
    if kind is type(None):
        return "None"
    return kind.__name__ if kind in (int, float, bool, str) else "dict" if is_typeddict(kind) or kind is dict else "any"


def random_model(case: Case, seed: int) -> torch.nn.Module:
    """Returns a float32 model. Its weights are far from usual initial values, so scores, activations and norms all
    affect the results."""
    config, model = case.family
    return randomized(model(config(**SIZES | case.config, dtype=torch.float32)).eval(), case, seed)


def randomized(model: torch.nn.Module, case: Case, seed: int) -> torch.nn.Module:
    """Returns `model` with random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(*case.scales, generator=generator)
            else:
                parameter.normal_(std=case.spread * parameter.shape[-1] ** -0.5, generator=generator)
        for name, buffer in model.named_buffers():
            # The bias is not negative: transformers before 5.24 sets the biased scores of experts outside the chosen
            # groups to 0, so a negative biased score within these groups would lose against them.
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(0.0, 0.5, generator=generator)
    return model


def rows(seed: int) -> dict[str, np.ndarray]:
    """Returns a batch with one document per row."""
    return batch_of(np.ones((ROWS, LENGTH), np.int32), seed)


def packed(seed: int) -> dict[str, np.ndarray]:
    """Returns a batch with up to three documents per row, and padding."""
    return batch_of(np.array([[1] * 8 + [2] * 9 + [0] * 3, [1] * 1 + [2] * 12 + [3] * 7], np.int32), seed + 1000)


def batch_of(segment: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Returns random tokens and targets under the field names of the trainer's batches. About a tenth of the
    targets do not contribute to the loss."""
    rng = np.random.default_rng(seed)
    place = np.arange(segment.shape[1])
    first = np.diff(segment, axis=1, prepend=-1) != 0
    counts = rng.random(segment.shape) > 0.1
    batch = {
        "inputs": rng.integers(0, SIZES["vocab_size"], segment.shape),
        "targets": rng.integers(0, SIZES["vocab_size"], segment.shape),
        "inputs_position": place - np.maximum.accumulate(np.where(first, place, 0), axis=1),
        "inputs_segmentation": segment,
        "targets_segmentation": np.where(counts, segment, 0),
    }
    return {name: array.astype(np.int32) for name, array in batch.items()}


def generated(model, inputs: np.ndarray) -> dict[str, Any]:
    """Continues the first PROMPT tokens of each row greedily, to a length of CONTINUED.

    Returns the tokens including the prompt, int [rows, CONTINUED], and for each new token the difference between the
    two largest logits.
    """
    prompt = torch.tensor(inputs[:, :PROMPT], dtype=torch.long)
    how = {"do_sample": False, "max_length": CONTINUED, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    out = model.generate(prompt, **how, eos_token_id=None, return_dict_in_generate=True, output_logits=True)
    best = torch.stack(out.logits, dim=1).topk(2, dim=-1).values
    margin = (best[..., 0] - best[..., 1]).numpy()
    return {"generated/tokens": out.sequences.numpy().astype(np.int32), "generated/margin": margin}


def additive_mask(batch: dict[str, np.ndarray], window: int | None) -> torch.Tensor:
    """Returns a mask to add to attention scores. It is 0 where the key is in the query's segment, not later than the
    query, and within the window; elsewhere it is a large negative number."""
    segment, position = batch["inputs_segmentation"], batch["inputs_position"]
    distance = position[:, :, None] - position[:, None, :]
    seen = (segment[:, :, None] == segment[:, None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    return torch.tensor(np.where(seen, 0, np.finfo(np.float32).min)[:, None], dtype=torch.float32)


def computed(model, batch: dict[str, np.ndarray], masked: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns logits [rows, length, vocab], and a dict from the tensor name of each parameter to its gradient of the
    mean cross entropy."""
    tokens = {name: torch.tensor(array, dtype=torch.long) for name, array in batch.items()}
    packing: dict[str, torch.Tensor] = {}
    if masked:
        window = getattr(model.config, "sliding_window", None)
        kinds = {SLIDING: additive_mask(batch, window), FULL: additive_mask(batch, None)}
        alternates = window is not None and len(set(getattr(model.config, "layer_types", None) or ())) > 1
        packing["attention_mask"] = kinds if alternates else kinds[SLIDING]
        packing["position_ids"] = tokens["inputs_position"]
    model.zero_grad()
    if masked and model.config.model_type in WHOLE_ROWS:
        logits = by_document(model, tokens)
    else:
        logits = model(input_ids=tokens["inputs"], use_cache=False, **packing).logits
    counts = tokens["targets_segmentation"] != 0
    cross_entropy(logits[counts], tokens["targets"][counts]).backward()
    return logits.detach().numpy(), gradients(model)


def by_document(model, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns logits [rows, length, vocab] of a packed batch. Each document and the padding are computed alone."""
    rows = []
    for inputs, segment in zip(tokens["inputs"], tokens["inputs_segmentation"], strict=True):
        _, lengths = torch.unique_consecutive(segment, return_counts=True)
        documents = inputs.split(lengths.tolist())
        rows.append(torch.cat([model(input_ids=it[None], use_cache=False).logits[0] for it in documents]))
    return torch.stack(rows)


@torch.no_grad()
def gradients(model) -> dict[str, np.ndarray]:
    """Returns gradients under the tensor names of the weight file: saves the model with gradients as its parameters."""
    values = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.copy_(parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = load_file(Path(folder) / "model.safetensors")
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)
    buffers = dict(model.named_buffers())
    return {name: gradient for name, gradient in found.items() if name not in buffers}


@torch.no_grad()
def check_mask(model, batch: dict[str, np.ndarray], logits: np.ndarray) -> None:
    """Checks that each packed document has the same logits when transformers computes it alone and makes the mask
    itself."""
    for tokens, segment, row in zip(batch["inputs"], batch["inputs_segmentation"], logits, strict=True):
        for number in set(segment) - {0}:
            here = segment == number
            alone = model(input_ids=torch.tensor(tokens[here], dtype=torch.long)[None], use_cache=False).logits[0]
            np.testing.assert_allclose(row[here], alone.numpy(), atol=1e-4)


if __name__ == "__main__":
    main()
