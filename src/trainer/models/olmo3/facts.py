"""The properties of OLMo 3 that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.capabilities.windows import ALTERNATING
from trainer.config.family import Facts
from trainer.models.olmo2.facts import tensors

FACTS = Facts(
    "trainer.models.olmo3.family:FAMILY",
    reads=("sliding_window_pattern",),
    fixes=ALTERNATING,
    period=4,
    tensors=tensors,
)
