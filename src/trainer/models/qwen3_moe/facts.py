"""`Facts` of Qwen3 with experts, for the configuration stage."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts("trainer.models.qwen3_moe.family:FAMILY", reads=("num_experts", "norm_topk_prob"), tensors=of_blocks)
