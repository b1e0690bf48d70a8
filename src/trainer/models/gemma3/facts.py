"""The properties of Gemma 3 that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.capabilities.windows import ALTERNATING
from trainer.config.family import Facts
from trainer.models.gemma.facts import FIXES, tensors

FACTS = Facts(
    "trainer.models.gemma3.family:FAMILY",
    reads=("sliding_window_pattern", "use_post_attn_norm", "use_post_ffw_norm"),
    fixes={**FIXES, **ALTERNATING, "use_qk_norm": True},
    period=6,
    tensors=tensors,
)
