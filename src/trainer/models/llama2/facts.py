"""Llama's `Facts`, for the configuration stage."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.llama2.family:FAMILY", tensors=of_blocks)
