"""`Facts` of Qwen2, for the configuration stage."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.qwen2.family:FAMILY", reads=("attention_bias",), tensors=of_blocks)
