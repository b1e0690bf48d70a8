"""The properties of Qwen3-Next that the configuration stage reads (`trainer.config.family.Facts`)."""

from trainer.config.family import PATTERN, RECURRENT, Facts

READS = (PATTERN, *RECURRENT, "partial_rotary_factor")
# These arguments of MaxText are accepted without effect. The blocks always normalize as with use_qk_norm_in_gdn=true
# and use_qk_norm=false; use_qk_norm=true would add a different norm. use_mrope does not change RoPE for text.
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
