"""OLMo 3 (Ai2 2025, arXiv:2512.13961): OLMo 2's block, three layers with a window for each without."""

from trainer.config import Config
from trainer.layers.stack import Stack
from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.huggingface import HuggingFace
from trainer.models.olmo2.family import LAYOUTS, Block
from trainer.models.patterns import alternating


def stacks(config: Config) -> list[Stack]:
    """Returns the layers with and without a window, in their pattern."""
    return alternating(Block, config)


FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "olmo3",
            "Olmo3ForCausalLM",
            LAYOUTS,
            defaults={
                **{"rms_norm_eps": 1e-5, "rope_theta": 500_000},
                **{"sliding_window": 4096, "sliding_window_pattern": 4},
            },
            qk_norm=True,
            window="alternating",
            local_rope="rope_theta",
        )
    ],
    maxtext=MaxText(norms_heads=True, keys=("sliding_window_size",)),
)
