"""The DeepSeek family: multi-head latent attention, and routed and shared experts (DeepSeek-V2, arXiv:2405.04434).
DeepSeek-V3 (arXiv:2412.19437) adds sigmoid scores and a router bias.
"""

from collections.abc import Callable, Mapping
from typing import Any

from trainer.config.capabilities.expert_keys import SIGMOID, scores_by_sigmoid
from trainer.config.family import LATENT
from trainer.config.keys import Config
from trainer.layers.mla import PROJECTIONS
from trainer.layers.stack import MakeBlock, Stack
from trainer.models.deepseek.block import NAME, ROUTED, SHARED, Block, DenseBlock
from trainer.models.experts import stack_of
from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import COUNT, EPSILON, LOG, NUMBERS, SIZES, USED, Gguf
from trainer.models.huggingface import EXPERT, HuggingFace, Layout
from trainer.models.llama2.family import LAYOUTS as OF_LLAMA

DENSE, SPARSE = "dense_layers", "moe_layers"


def stacks(config: Config, dense: MakeBlock = DenseBlock, sparse: MakeBlock = Block) -> list[Stack]:
    """Returns the stacks. The first `first_num_dense_layers` layers have an MLP.

    Of the others, every `interleave_moe_layer_step`-th has experts, and the rest have an MLP.
    """
    first = config.first_num_dense_layers
    others = stack_of(config, SPARSE, dense, sparse, config.base_num_decoder_layers - first)
    return [Stack(DENSE, (dense,), first), others]


_LAYER = "model.layers.{}."
_ATTENTION = {
    "pre_self_attention_layer_norm/scale": Layout(_LAYER + "input_layernorm.weight"),
    "self_attention/query/kernel": Layout(_LAYER + "self_attn.q_proj.weight", inputs=1),
    "self_attention/wq_a/kernel": Layout(_LAYER + "self_attn.q_a_proj.weight", inputs=1),
    "self_attention/q_norm/scale": Layout(_LAYER + "self_attn.q_a_layernorm.weight"),
    "self_attention/wq_b/kernel": Layout(_LAYER + "self_attn.q_b_proj.weight", inputs=1),
    "self_attention/wkv_a/kernel": Layout(_LAYER + "self_attn.kv_a_proj_with_mqa.weight", inputs=1),
    "self_attention/kv_norm/scale": Layout(_LAYER + "self_attn.kv_a_layernorm.weight"),
    "self_attention/wkv_b/kernel": Layout(_LAYER + "self_attn.kv_b_proj.weight", inputs=1),
    "self_attention/out/kernel": Layout(_LAYER + "self_attn.o_proj.weight", inputs=2),
    "post_self_attention_layer_norm/scale": Layout(_LAYER + "post_attention_layernorm.weight"),
}


def _gated(own: str, there: str, end: str = "/kernel") -> dict[str, Layout]:
    names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    return {f"{own}/{name}{end}": Layout(f"{_LAYER}{there}.{it}.weight", inputs=1) for name, it in names.items()}


_EXPERTS = {
    f"{NAME}/{ROUTED}/gate/kernel": Layout(_LAYER + "mlp.gate.weight", inputs=1),
    f"{NAME}/{ROUTED}/gate/bias": Layout(_LAYER + "mlp.gate.e_score_correction_bias"),
    **_gated(f"{NAME}/{ROUTED}", f"mlp.experts.{EXPERT}", end=""),
    **_gated(f"{NAME}/{SHARED}", "mlp.shared_experts"),
}


def layouts(block: Mapping[str, Layout]) -> dict[str, Layout]:
    """Returns the layouts of a model with the stacks of `stacks`. `block`: the layouts that all blocks share."""
    return {
        **{name: it for name, it in OF_LLAMA.items() if not name.startswith("decoder/layers/")},
        **{f"decoder/{DENSE}/{name}": it for name, it in {**block, **_gated("mlp", "mlp")}.items()},
        **{f"decoder/{SPARSE}/{name}": it for name, it in {**block, **_EXPERTS}.items()},
    }


LAYOUTS = layouts(_ATTENTION)
OF_EXPERTS = {
    "base_mlp_dim": "intermediate_size",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "base_moe_mlp_dim": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "routed_scaling_factor": "routed_scaling_factor",
    "norm_topk_prob": "norm_topk_prob",
    "first_num_dense_layers": "first_k_dense_replace",
}
OF_LATENT = OF_EXPERTS | {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
BY_SIGMOID = {"routed_score_func": SIGMOID, "routed_bias": True}
# In transformers, the norms of latents always have the epsilon 1e-6, regardless of rms_norm_eps.
_ONLY = {"rms_norm_eps": 1e-6, "moe_layer_freq": 1}

# Metadata keys of GGUF files. The first two are the widths of a head's keys and values, the next two the widths of the
# latent keys and values, which all heads share. SCORE and NORM describe how experts are scored.
_HEAD, _HEAD_V = "attention.key_length_mla", "attention.value_length_mla"
_KEYS, _VALUES = "attention.key_length", "attention.value_length"
SCORE, SOFTMAX_THERE, SIGMOID_THERE = "expert_gating_func", 1, 2
NORM = "expert_weights_norm"


def other_epsilon(said: Callable[..., Any]) -> bool:
    """Returns whether the norm epsilon in a file differs from DeepSeek's. `said`: the argument of `Gguf.when`."""
    return round(said(EPSILON, float) or _ONLY["rms_norm_eps"], 12) != _ONLY["rms_norm_eps"]


def fields(said: Mapping[str, Any]) -> dict[str, Any]:
    """See `Gguf.fields`. Files from before April 2025 store key_length_mla and value_length_mla, the sizes of a head,
    as key_length and value_length."""
    rope, groups = said.get("qk_rope_head_dim") or 0, said.get("n_group") or 1
    return {
        "num_key_value_heads": said.get("num_attention_heads"),
        **{"head_dim": rope, "q_lora_rank": said.get("q_lora_rank")},
        "qk_nope_head_dim": (said.get(_HEAD) or said.get(_KEYS) or 0) - rope,
        "v_head_dim": said.get(_HEAD_V) or said.get(_VALUES),
        **{"norm_topk_prob": said.get(NORM, False), "routed_scaling_factor": said.get("routed_scaling_factor", 1.0)},
        **({"topk_method": _V2.methods[groups > 1]} if said.get(SCORE, SOFTMAX_THERE) == SOFTMAX_THERE else {}),
        **{"n_group": groups, "topk_group": said.get("topk_group") or 1},
        "num_nextn_predict_layers": 0,  # these files have no multi-token prediction modules
    }


def gguf_values(data: Mapping[str, Any]) -> dict[str, Any]:
    rope, latent = data["qk_rope_head_dim"], data["kv_lora_rank"]
    return {
        **{"attention.head_count_kv": 1, _KEYS: latent + rope, _VALUES: latent},
        **{_HEAD: data["qk_nope_head_dim"] + rope, _HEAD_V: data["v_head_dim"]},
        SCORE: SIGMOID_THERE if data["scoring_func"] == SIGMOID else SOFTMAX_THERE,
        NORM: data["norm_topk_prob"],
    }


def _refuses(data: Mapping[str, Any]) -> str:
    if data["scoring_func"] != SIGMOID and data["n_group"] > 1:
        return f"n_group={data['n_group']}: it chooses groups as DeepSeek-V3 does"
    if data["q_lora_rank"] is None and data["num_hidden_layers"] not in (26, 27):
        return "q_lora_rank=null: it reads this in models of 26 and 27 layers only"
    return ""


SIZES_OF_EXPERTS = {
    **{"leading_dense_block_count": "first_k_dense_replace", COUNT: "n_routed_experts"},
    **{USED: "num_experts_per_tok", "expert_shared_count": "n_shared_experts"},
    **{"expert_group_count": "n_group", "expert_group_used_count": "topk_group"},
    "expert_feed_forward_length": "moe_intermediate_size",
}
NUMBERS_OF_EXPERTS = NUMBERS | {"expert_weights_scale": "routed_scaling_factor"}
GGUF = Gguf(
    "deepseek2",
    when=lambda said: said(SCORE) in (None, SOFTMAX_THERE) and not other_epsilon(said),
    sizes={
        **{name: field for name, field in SIZES.items() if name not in ("attention.head_count_kv", _KEYS)},
        **{"rope.dimension_count": "qk_rope_head_dim", **SIZES_OF_EXPERTS},
        **{f"attention.{name}": name for name in ("q_lora_rank", "kv_lora_rank")},
    },
    numbers=NUMBERS_OF_EXPERTS,
    more={
        **dict.fromkeys(("attention.head_count_kv", _KEYS, _VALUES, _HEAD, _HEAD_V, SCORE), int),
        **{NORM: bool, LOG: float},
    },
    fields=fields,
    write=gguf_values,
    refuses=_refuses,
)
_V2 = HuggingFace(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    LAYOUTS,
    defaults={
        "first_k_dense_replace": 0,
        "n_group": None,
        "topk_group": None,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    sizes=OF_LATENT,
    only=_ONLY | {"scoring_func": "softmax", "norm_topk_prob": False},  # transformers ignores norm_topk_prob
    implies={"routed_score_func": "", "routed_bias": False, "norm_topk_prob": False},
    latent=True,
    methods=("greedy", "group_limited_greedy"),
    gguf=GGUF,
)
_V3 = HuggingFace(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    LAYOUTS,
    defaults={
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
    },
    sizes=OF_LATENT,
    only=_ONLY | {"scoring_func": SIGMOID, "rope_interleave": True},
    implies=BY_SIGMOID,
    aliases=("kimi_k2",),
    latent=True,
    methods=("noaux_tc", "noaux_tc"),
    gguf=GGUF._replace(when=lambda said: said(SCORE) == SIGMOID_THERE and not other_epsilon(said)),
)

# With this preset, MaxText's block routes as in DeepSeek-V3. Its sizes are overridden by the keys that we write.
_AS_V3 = {"model_name": "deepseek3-671b", "override_model_config": True}


def _maxtext_keys(config: Config) -> dict[str, Any]:
    names = (*LATENT, "attention_type", "mscale", "first_num_dense_layers", "shared_experts", "routed_scaling_factor")
    keys = {name: config[name] for name in names}
    if config.rope_type != "yarn":
        keys["rope_factor"] = 1  # under every rope_type, MaxText scales MLA scores by rope_factor
    if config.rope_type == "default":
        # MaxText's default RoPE cannot rotate adjacent pairs of entries. Its YaRN can, and with factor 1 has the same
        # angles.
        keys |= {"rope_type": "yarn", "rope_interleave": True}
    if not scores_by_sigmoid(config):
        return keys | {"routed_score_func": "softmax"}
    return (
        keys
        | {
            name: config[name]
            for name in ("routed_score_func", "routed_bias", "n_routing_groups", "topk_routing_group")
        }
        | _AS_V3
    )


def _maxtext_refuses(config: Config) -> list[str]:
    refused = []
    if config.rope_type == "default" and config.rope_linear_scaling_factor != 1:
        refused.append(f"rope_linear_scaling_factor={config.rope_linear_scaling_factor}: it rotates halves then")
    if scores_by_sigmoid(config):
        divides = "norm_topk_prob=False: it always divides sigmoid scores by their sum"
        return refused if config.norm_topk_prob else [*refused, divides]
    if config.norm_topk_prob:
        refused.append("norm_topk_prob=True: it does not read this key in this block")
    if config.n_routing_groups > 1:
        refused.append(f"n_routing_groups={config.n_routing_groups}: its groups are those of DeepSeek-V3")
    return refused


_WIDTH = ("fsdp", "expert", "context", "context_usp_ulysses")  # the mesh axes of the logical axis embed
AXES = {"q_lora_up_proj": (), "q_lora": _WIDTH, "kv_lora_up_proj": (), "kv_lora": _WIDTH}

FAMILY = Family(
    stacks,
    forward_flops_per_token,
    projections=PROJECTIONS,
    axes=AXES,
    hugging_face=(_V3, _V2),
    maxtext=MaxText(more=_maxtext_keys, refuses=_maxtext_refuses),
)
