"""The properties of Granite 3 with experts that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import MULTIPLIERS, Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.granite_moe.family:FAMILY", reads=("num_experts", *MULTIPLIERS), tensors=of_blocks)
