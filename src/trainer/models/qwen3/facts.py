"""What the first stage asks about Qwen3."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.qwen3.family:FAMILY", tensors=of_blocks)
