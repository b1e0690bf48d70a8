"""`Facts` of Qwen3, for the configuration stage."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.qwen3.family:FAMILY", tensors=of_blocks)
