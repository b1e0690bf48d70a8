"""`Facts` of DeepSeek, for the configuration stage."""

from trainer.config.capabilities.latent_keys import TYPE, is_latent
from trainer.config.family import LATENT, OF_SOME, Facts
from trainer.config.keys import Config


def _latent(config: Config) -> str | None:
    if is_latent(config):
        return None
    return f"this family uses multi-head latent attention; give attention_type={TYPE}"


FACTS = Facts(
    "trainer.models.deepseek.family:FAMILY",
    reads=("num_experts", "norm_topk_prob", *OF_SOME, *LATENT),
    checks=((("decoder_block", "attention_type"), _latent),),
)
