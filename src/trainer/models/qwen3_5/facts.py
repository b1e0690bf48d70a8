"""The properties of Qwen 3.5 and 3.6 that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import Facts
from trainer.models.qwen3_next.facts import FIXES, READS, WORDS

# In MaxText, the block qwen3_5 always has experts.
WITH_EXPERTS = {**WORDS, "decoder_block=qwen3_5": "decoder_block=qwen3_5_moe"}

FACTS = Facts(
    "trainer.models.qwen3_5.family:FAMILY", reads=READS, fixes=FIXES, recurrent=True, maxtext_words=WITH_EXPERTS
)
