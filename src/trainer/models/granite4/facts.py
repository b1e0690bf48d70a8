"""`Facts` of Granite 4, for the configuration stage."""

from trainer.config.family import MULTIPLIERS, Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.granite4.family:FAMILY", reads=MULTIPLIERS, tensors=of_blocks)
