"""`Facts` of Mixtral, for the configuration stage."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.mixtral.family:FAMILY", reads=("num_experts",), tensors=of_blocks)
