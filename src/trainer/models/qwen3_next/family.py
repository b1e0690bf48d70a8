"""Qwen3-Next (Qwen team 2025): the blocks of `qwen3_next.block` with experts. Hugging Face's format merges several
projections into one tensor, whose outputs are grouped by head; merged convolutions are not grouped."""

from collections.abc import Mapping
from typing import Any

from trainer.config.errors import shortened
from trainer.config.keys import Config
from trainer.config.limits import PERIOD
from trainer.layers.delta_net import PROJECTIONS
from trainer.models.experts import layouts
from trainer.models.family import Family
from trainer.models.gemma.family import Norm
from trainer.models.huggingface import EXPERT, HuggingFace, Layout, Merged, Modules
from trainer.models.llama2.family import LAYOUTS as OF_LLAMA
from trainer.models.phi3.family import no_tokens
from trainer.models.qwen3.family import NORMS
from trainer.models.qwen3_next.block import forward_flops, sparse_stacks
from trainer.models.qwen3_next.maxtext import NEXT

_OURS, _LAYER = "decoder/layers/", "model.layers.{}."
_RECURRENT, _LINEAR = f"{_OURS}linear_attention/", f"{_LAYER}linear_attn."
_PROJECTIONS = {"query": "q", "key": "k", "value": "v", "gating": "z", "beta": "b", "decay": "a"}
# The tensors of attention and of recurrent layers.
MIXERS = {
    **NORMS,
    f"{_OURS}self_attention/query/kernel": Layout(f"{_LAYER}self_attn.q_proj_q.weight", inputs=1, rotated="head_dim"),
    f"{_OURS}self_attention/gating/kernel": Layout(f"{_LAYER}self_attn.q_proj_gate.weight", inputs=1),
    **{
        f"{_RECURRENT}{ours}/kernel": Layout(f"{_LINEAR}in_proj_{theirs}.weight", inputs=1)
        for ours, theirs in _PROJECTIONS.items()
    },
    **{
        f"{_RECURRENT}{name}_conv/kernel": Layout(f"{_LINEAR}conv1d_{name}.weight", inputs=1, depthwise=True)
        for name in ("query", "key", "value")
    },
    f"{_RECURRENT}A_log": Layout(f"{_LINEAR}A_log"),
    f"{_RECURRENT}dt_bias": Layout(f"{_LINEAR}dt_bias"),
    f"{_RECURRENT}norm/scale": Layout(f"{_LINEAR}norm.weight"),
    f"{_RECURRENT}out/kernel": Layout(f"{_LINEAR}out_proj.weight", inputs=2),
}
MERGED = (
    Merged("self_attn.q_proj", ("self_attn.q_proj_q", "self_attn.q_proj_gate"), groups="base_num_query_heads"),
    Merged("linear_attn.conv1d", [f"linear_attn.conv1d_{name}" for name in ("query", "key", "value")]),
)
_PER_KEY_HEAD = tuple(
    Merged(f"linear_attn.in_proj_{names}", [f"linear_attn.in_proj_{name}" for name in names], "gdn_num_key_heads")
    for names in ("qkvz", "ba")
)
_SHARED = {
    f"{_OURS}mlp/shared_expert/{ours}/kernel": Layout(f"{_LAYER}mlp.shared_expert.{theirs}_proj.weight", inputs=1)
    for ours, theirs in {"wi_0": "gate", "wi_1": "up", "wo": "down"}.items()
}
_EXPERT = f"mlp.experts.{EXPERT}."
OF_EXPERTS = {
    name: layout
    for name, layout in layouts(
        "mlp/routed_experts",
        "mlp.gate.weight",
        *(f"{_EXPERT}{part}_proj.weight" for part in ("gate", "up", "down")),
    ).items()
    if name not in OF_LLAMA or "/mlp/" not in name
} | {
    **_SHARED,
    f"{_OURS}mlp/shared_expert_gate/kernel": Layout(f"{_LAYER}mlp.shared_expert_gate.weight", inputs=1),
}
MODULE = Modules("mtp.", "mtp.layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), most=1)
SIZES = {
    **{"gdn_num_key_heads": "linear_num_key_heads", "gdn_num_value_heads": "linear_num_value_heads"},
    **{"gdn_key_head_dim": "linear_key_head_dim", "gdn_value_head_dim": "linear_value_head_dim"},
    "gdn_conv_kernel_dim": "linear_conv_kernel_dim",
}
SIZES_OF_EXPERTS = {
    **{"num_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"},
    **{"base_moe_mlp_dim": "moe_intermediate_size"},
}
_SHARED_WIDTH = "shared_expert_intermediate_size"
DEFAULTS = {
    **{"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
}
DEFAULTS_OF_EXPERTS = {"moe_intermediate_size": 512, _SHARED_WIDTH: 512}
FIELDS = ("layer_types", "full_attention_interval", "output_gate_type")
FIELDS_OF_EXPERTS = (*FIELDS, _SHARED_WIDTH)
_FULL, _LINEAR_KIND = "full_attention", "linear_attention"


def _kinds(every: int, layers: int) -> list[str]:
    return [_LINEAR_KIND if (i + 1) % every else _FULL for i in range(layers)]


def read(said: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    """See `HuggingFace.read`. As in transformers, layer_types takes precedence over full_attention_interval."""
    layers, every, given = said["num_hidden_layers"], said["full_attention_interval"], said.get("layer_types")
    if given:
        every = given.index(_FULL) + 1 if _FULL in given else layers + 1
        if list(given) != _kinds(every, layers):
            refused.append(
                f"layer_types={shortened(str(given))} (known: every n-th is {_FULL}, the others {_LINEAR_KIND})"
            )
    if min(every, layers) > PERIOD:
        refused.append(f"layer types that repeat after {every} layers (known: up to {PERIOD})")
    if (gate := said.get("output_gate_type") or "silu") not in ("silu", "swish"):  # in recurrent layers
        refused.append(f"output_gate_type={shortened(gate)} (known: silu, also called swish)")
    return {"inhomogeneous_layer_cycle_interval": every}


def read_sparse(said: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    """Like `read`, but also returns the number of shared experts, each of which is as wide as a routed expert."""
    width, each = said[_SHARED_WIDTH], said["moe_intermediate_size"]
    if width < 1 or width % each:
        refused.append(f"{_SHARED_WIDTH}={width} (known: multiples of moe_intermediate_size={each})")
    return {**read(said, refused), "shared_experts": max(width // each, 1)}


def write(config: Config) -> dict[str, Any]:
    """See `HuggingFace.write`."""
    every = config.inhomogeneous_layer_cycle_interval
    return {
        **no_tokens(config),
        "full_attention_interval": every,
        "layer_types": _kinds(every, config.base_num_decoder_layers),
    }


def write_sparse(config: Config) -> dict[str, Any]:
    """Inverts `read_sparse`."""
    return {**write(config), _SHARED_WIDTH: config.shared_experts * config.base_moe_mlp_dim}


FAMILY = Family(
    sparse_stacks,
    forward_flops,
    projections=PROJECTIONS,
    norm=Norm,
    hugging_face=[
        HuggingFace(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            OF_EXPERTS | MIXERS,
            defaults={
                **DEFAULTS,
                **DEFAULTS_OF_EXPERTS,
                **{"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1},
            },
            merged=(*MERGED, *_PER_KEY_HEAD),
            qk_norm=True,
            window="read",
            partial=True,
            sizes={**SIZES, **SIZES_OF_EXPERTS, "norm_topk_prob": "norm_topk_prob"},
            only={"mlp_only_layers": [], "decoder_sparse_step": 1},
            fields=FIELDS_OF_EXPERTS,
            read=read_sparse,
            write=write_sparse,
            ignored=("intermediate_size", "use_sliding_window"),
            mtp=MODULE,
        )
    ],
    maxtext=NEXT,
)
