"""The properties of GLM 4.5 to 4.7 that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import OF_SOME, Facts
from trainer.config.tensors import of_blocks

FACTS = Facts(
    "trainer.models.glm4_moe.family:FAMILY",
    reads=("num_experts", "norm_topk_prob", *OF_SOME, "attention_bias", "partial_rotary_factor"),
    fixes={"rope_interleave": False},
    tensors=of_blocks,
)
