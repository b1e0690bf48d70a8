"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama's block; its first version slides a window over 4096 tokens."""

from trainer.models.huggingface import Family
from trainer.models.llama2 import LAYOUTS, Block

__all__ = ["HUGGING_FACE", "Block"]

HUGGING_FACE = Family(
    "mistral",
    "MistralForCausalLM",
    LAYOUTS,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    window="given",
    maxtext_scales_query=True,
)
