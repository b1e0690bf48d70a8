"""What the first stage asks about SmolLM3."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.smollm3.family:FAMILY", reads=("nope_layer_interval",), tensors=of_blocks)
