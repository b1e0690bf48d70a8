"""The properties of Granite 3 that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import MULTIPLIERS, Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.granite.family:FAMILY", reads=MULTIPLIERS, tensors=of_blocks)
