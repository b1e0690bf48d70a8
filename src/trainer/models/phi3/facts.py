"""The properties of Phi 3 and 4 that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import Facts
from trainer.config.keys import Config
from trainer.config.tensors import of_blocks


def _halves(config: Config) -> str | None:
    if config.partial_rotary_factor == 1 or not config.rope_interleave:
        return None
    return "partly rotated heads are stored as halves: set rope_interleave=false"


FACTS = Facts(
    "trainer.models.phi3.family:FAMILY",
    reads=("partial_rotary_factor", "rope_short_factor", "rope_long_factor"),
    checks=((("partial_rotary_factor", "rope_interleave"), _halves),),
    tensors=of_blocks,
)
