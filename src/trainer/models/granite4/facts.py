"""What the first stage asks about Granite 4."""

from trainer.config.family import MULTIPLIERS, Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.granite4.family:FAMILY", reads=MULTIPLIERS, tensors=of_blocks)
