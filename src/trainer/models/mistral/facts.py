"""The properties of Mistral that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.mistral.family:FAMILY", tensors=of_blocks)
