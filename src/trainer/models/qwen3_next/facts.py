"""`Facts` of Qwen3-Next, for the configuration stage."""

from trainer.config.family import PATTERN, RECURRENT, Facts

READS = (PATTERN, *RECURRENT, "partial_rotary_factor")
# Its blocks have these values always; its key use_qk_norm=true would be another norm. Text is rotated in the same way
# with and without use_mrope.
WORDS = dict.fromkeys(("use_qk_norm_in_gdn=true", "use_qk_norm=false", "use_mrope=true", "use_mrope=false"), "")
FIXES = {"attention_type": "global", "rope_interleave": False, "use_qk_norm": True}
FACTS = Facts(
    "trainer.models.qwen3_next.family:FAMILY",
    reads=(*READS, "num_experts", "norm_topk_prob", "shared_experts"),
    fixes=FIXES | {"interleave_moe_layer_step": 1},
    recurrent=True,
    has_rest=True,
    maxtext_words=WORDS,
)
