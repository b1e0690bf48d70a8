"""The properties of Qwen2 that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.qwen2.family:FAMILY", reads=("attention_bias",), tensors=of_blocks)
