"""Phi 3 and Phi 4 (Abdin et al. 2024, arXiv:2404.14219, arXiv:2412.08905; Phi-4-mini: arXiv:2503.01743): Llama's block.
RoPE may scale wavelengths by factors that depend on whether a text is long (LongRoPE), and may rotate only a part of
each head. Hugging Face's format merges queries, keys and values into one tensor, and gate and up into another."""

from collections.abc import Mapping
from typing import Any

from trainer.config.keys import Config
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import ATTENTION, SIZES, WINDOW, Gguf
from trainer.models.huggingface import HuggingFace, Merged
from trainer.models.llama2.family import LAYOUTS, stacks


def _read(said: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    """See `HuggingFace.read`. If RoPE is scaled, a window of at least max_position_embeddings tokens is ignored."""
    del refused
    rope = said.get("rope_scaling") or said.get("rope_parameters") or {}
    stretched = (rope.get("rope_type") or rope.get("type") or "default") != "default"
    window, longest = said.get("sliding_window") or 0, said.get("max_position_embeddings") or 0
    return {"attention_type": "global"} if stretched and window >= longest > 0 else {}


def no_tokens(config: Config) -> dict[str, Any]:
    """Returns the fields for token ids, with value null. If they were absent, transformers would use the ids of the
    published vocabulary."""
    del config
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def _hidden(data: Mapping[str, Any]) -> str:
    window = data.get("sliding_window")
    return f"sliding_window={window}: llama.cpp's phi3 attends to whole texts" if window else ""


GATE_UP = Merged("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "phi3",
            "Phi3ForCausalLM",
            LAYOUTS,
            defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
            merged=(
                Merged("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                GATE_UP,
            ),
            window="given",
            whole_heads=True,
            ropes=("default", "longrope", "su"),
            partial=True,
            off=("lm_head_bias",),  # a field of Phi-4-mini
            read=_read,
            write=no_tokens,
            ignored=("full_attn_mod", "interpolate_factor"),  # fields of Phi-4-mini
            gguf=Gguf(
                "phi3",
                sizes=SIZES | {WINDOW: "sliding_window"},
                more={ATTENTION: float},
                write=lambda data: {WINDOW: 0},
                refuses=_hidden,
            ),
        )
    ],
)
