"""Granite 4 (IBM 2025) without Mamba and without experts: the same architecture as Granite 3. Its checkpoints have
the format of the models with Mamba and experts: gate and up are merged, and the MLP is named like a shared expert."""

from collections.abc import Mapping
from typing import Any

from trainer.config.json_files import shown
from trainer.config.keys import Config
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.granite.family import DEFAULTS, FACTORS, POWERS
from trainer.models.huggingface import HuggingFace, Merged
from trainer.models.llama2.family import LAYOUTS, stacks

_MLP = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "output_linear"}
SHARED = {
    name: layout._replace(name=layout.name.replace(f".mlp.{part}.", f".shared_mlp.{there}."))
    for part, there in _MLP.items()
    for name, layout in LAYOUTS.items()
    if f".mlp.{part}." in layout.name
}
GATE_UP = Merged("shared_mlp.input_linear", ("shared_mlp.gate_proj", "shared_mlp.up_proj"))


def _read(said: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    """See `HuggingFace.read`. Refuses Mamba layers and models without RoPE.

    If neither `layer_types` nor `layers_block_type` is set, every layer is a Mamba layer. If `position_embedding_type`
    is not "rope", no layer has RoPE.
    """
    if not (said.get("layer_types") or said.get("layers_block_type")):
        refused.append("layer_types=null: every layer is a Mamba layer, which is not supported")
    if (kind := said.get("position_embedding_type")) != "rope":
        refused.append(f'position_embedding_type={shown(kind)} (known: "rope")')
    return {}


def _write(config: Config) -> dict[str, Any]:
    layers = config.base_num_decoder_layers
    # transformers checks the sizes of Mamba layers even if the model has none.
    mamba = {"mamba_n_heads": 1, "mamba_d_head": 2 * config.base_emb_dim, "mamba_expand": 2}
    return {"layer_types": ["attention"] * layers, "position_embedding_type": "rope", **mamba}


_MAMBA = ("n_heads", "d_head", "expand", "n_groups", "d_state", "d_conv", "chunk_size", "conv_bias", "proj_bias")
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "granitemoehybrid",
            "GraniteMoeHybridForCausalLM",
            LAYOUTS | SHARED,
            defaults={**DEFAULTS, "num_local_experts": 8, "shared_intermediate_size": 1024},
            merged=(GATE_UP,),
            sizes={**FACTORS, "base_mlp_dim": "shared_intermediate_size"},
            powers=POWERS,
            only={"num_local_experts": 0, "normalization_function": "rmsnorm"},
            fields=("layer_types", "position_embedding_type"),
            read=_read,
            write=_write,
            # Fields for initialization, and for Mamba layers and experts, which these models lack.
            ignored=(*(f"mamba_{it}" for it in _MAMBA), "time_step_limit", "num_experts_per_tok", "init_method"),
        )
    ],
)
