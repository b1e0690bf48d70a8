"""The properties of Mixtral that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.mixtral.family:FAMILY", reads=("num_experts",), tensors=of_blocks)
