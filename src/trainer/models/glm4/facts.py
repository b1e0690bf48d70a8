"""The properties of GLM 4 that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts(
    "trainer.models.glm4.family:FAMILY",
    reads=("attention_bias", "partial_rotary_factor", "use_post_attn_norm", "use_post_ffw_norm"),
    fixes={"rope_interleave": True},
    tensors=of_blocks,
)
