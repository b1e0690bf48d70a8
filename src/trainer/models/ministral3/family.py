"""Ministral 3 and Devstral 2 (Mistral AI 2025): Mistral's block with YaRN. As in Llama 4 (arXiv:2501.19399),
queries beyond YaRN's original length are multiplied by a factor that grows with the position."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from trainer.config.keys import Config
from trainer.layers.stack import Stack
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import LOG, Gguf
from trainer.models.huggingface import HuggingFace
from trainer.models.llama2 import block as llama2
from trainer.models.llama2.family import LAYOUTS
from trainer.ops.temperature import Temperature


class Block(llama2.Block):
    """Llama's block. With `temperature_tuning`, queries are multiplied by a factor that grows with the position."""

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        return super().make_attention(config, rngs, dtypes, **grown(config), **given)


def grown(config: Config) -> dict[str, Any]:
    """Returns the attention layer's argument for `temperature_tuning`; {} if the key is false."""
    if not config.temperature_tuning:
        return {}
    return {"temperature": Temperature(config.temperature_tuning_scale, config.temperature_tuning_floor_scale)}


def stacks(config: Config) -> list[Stack]:
    """Returns one stack of equal blocks."""
    return [Stack("layers", (Block,), config.base_num_decoder_layers)]


ROPE_SIZES = {"temperature_tuning_scale": "llama_4_scaling_beta"}


def read(said: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    """See `HuggingFace.read`. `temperature_tuning_floor_scale` is YaRN's original length."""
    rope = said.get("rope_scaling") or said.get("rope_parameters") or {}
    if rope.get("llama_4_scaling_beta") is None:
        refused.append("RoPE without llama_4_scaling_beta")
    original = rope.get("original_max_position_embeddings")  # transformers reads it only from here
    if original is None:
        refused.append("RoPE without original_max_position_embeddings")
    return {} if original is None else {"temperature_tuning_floor_scale": original}


TEMPERATURE = "attention.temperature_scale"  # a key in GGUF


def _fields(said: Mapping[str, Any]) -> dict[str, Any]:
    """See `Gguf.fields`. llama.cpp scales queries and keys by YaRN's factor, unless `LOG` cancels this factor."""
    scale = float(f"{said[LOG]:.7g}") if LOG in said else None
    return {"rope_scaling": {**with_beta(said), **dict.fromkeys(("mscale", "mscale_all_dim"), scale)}}


def with_beta(said: Mapping[str, Any], usual: float | None = None) -> dict[str, Any]:
    """Returns the RoPE object for config.json with llama_4_scaling_beta added.

    The value is rounded to 7 digits because GGUF stores it as float32. `said`: the argument of `Gguf.fields`. `usual`:
    the value if the GGUF file has none.
    """
    beta = float(f"{said[TEMPERATURE]:.7g}") if TEMPERATURE in said else usual
    return {**(said["rope_scaling"] or {}), "llama_4_scaling_beta": beta}


def _gguf_values(data: Mapping[str, Any]) -> dict[str, Any]:
    rope = data["rope_scaling"]
    return {TEMPERATURE: float(rope["llama_4_scaling_beta"]), LOG: 1.0 if "attention_factor" in rope else None}


# The defaults of transformers' Ministral3Config.
_SIZES = {
    **{"vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 34},
    **{"num_attention_heads": 32, "max_position_embeddings": 262_144, "bos_token_id": 1, "eos_token_id": 2},
}
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "ministral3",
            "Ministral3ForCausalLM",
            LAYOUTS,
            defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
            window="given",
            ropes=("yarn",),
            rope_sizes=ROPE_SIZES,
            implies={"temperature_tuning": True},
            read=read,
            nested={**_SIZES, "pad_token_id": 11},
            gguf=Gguf(
                "mistral3", pairs=True, more={TEMPERATURE: float, LOG: float}, fields=_fields, write=_gguf_values
            ),
        )
    ],
)
