"""`Facts` of Qwen 3.5 and 3.6 with experts, for the configuration stage."""

from trainer.config.family import Facts
from trainer.models.qwen3_next.facts import FIXES, READS, WORDS

FACTS = Facts(
    "trainer.models.qwen3_5_moe.family:FAMILY",
    reads=(*READS, "num_experts", "shared_experts"),
    fixes=FIXES | {"interleave_moe_layer_step": 1, "norm_topk_prob": True},
    recurrent=True,
    has_rest=True,
    maxtext_words=WORDS,
)
