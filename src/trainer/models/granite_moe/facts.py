"""`Facts` of Granite 3 with experts, for the configuration stage."""

from trainer.config.family import MULTIPLIERS, Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.granite_moe.family:FAMILY", reads=("num_experts", *MULTIPLIERS), tensors=of_blocks)
