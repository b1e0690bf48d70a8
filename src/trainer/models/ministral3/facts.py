"""The properties of Ministral 3 that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import Facts
from trainer.config.keys import Config
from trainer.config.tensors import of_blocks

LENGTHS = ("temperature_tuning_floor_scale", "original_max_position_embeddings")


def _lengths(config: Config) -> str | None:
    if not config.temperature_tuning or len({config[key] for key in LENGTHS}) == 1:
        return None
    return "this family scales queries and RoPE beyond the same length: set both keys to the same number"


FACTS = Facts(
    "trainer.models.ministral3.family:FAMILY",
    reads=("temperature_tuning", "temperature_tuning_scale", "temperature_tuning_floor_scale"),
    checks=((LENGTHS, _lengths),),
    tensors=of_blocks,
)
