"""The properties of Qwen 3.5 and 3.6 with experts that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import Facts
from trainer.config.keys import Config
from trainer.models.qwen3_next.facts import FIXES, READS, WORDS


def _weights(config: Config) -> str | None:
    return (
        None
        if config.norm_topk_prob
        else "this family divides the weights of a token's experts by their sum: set norm_topk_prob=true"
    )


FACTS = Facts(
    "trainer.models.qwen3_5_moe.family:FAMILY",
    reads=(*READS, "num_experts", "norm_topk_prob", "shared_experts"),
    fixes=FIXES | {"interleave_moe_layer_step": 1},
    recurrent=True,
    has_rest=True,
    maxtext_words=WORDS,
    checks=((("decoder_block", "norm_topk_prob"), _weights),),
)
