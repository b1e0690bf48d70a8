"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama's block; its first version slides a window over 4096 tokens."""

from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import Gguf
from trainer.models.huggingface import HuggingFace
from trainer.models.llama2.family import LAYOUTS, MAXTEXT, stacks

FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "mistral",
            "MistralForCausalLM",
            LAYOUTS,
            defaults={"sliding_window": 4096, "num_key_value_heads": 8},
            window="given",
            gguf=Gguf("llama", pairs=True),
        )
    ],
    maxtext=MAXTEXT,
)
