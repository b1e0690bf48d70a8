"""The properties of SmolLM3 that the configuration stage reads (`trainer.config.family.Facts`)."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.smollm3.family:FAMILY", reads=("nope_layer_interval",), tensors=of_blocks)
