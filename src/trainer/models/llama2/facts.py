"""The properties of Llama that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.llama2.family:FAMILY", tensors=of_blocks)
