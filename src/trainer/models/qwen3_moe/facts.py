"""The properties of Qwen3 with experts that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.qwen3_moe.family:FAMILY", reads=("num_experts", "norm_topk_prob"), tensors=of_blocks)
