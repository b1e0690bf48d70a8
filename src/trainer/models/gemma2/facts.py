"""The properties of Gemma 2 that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.capabilities.windows import ALTERNATING
from trainer.config.family import Facts
from trainer.models.gemma.facts import FIXES, tensors

FACTS = Facts(
    "trainer.models.gemma2.family:FAMILY",
    reads=("sliding_window_pattern", "use_post_attn_norm", "use_post_ffw_norm"),
    fixes={**FIXES, **ALTERNATING},
    period=2,
    maxtext_layers=2,
    tensors=tensors,
)
