"""The properties of Granite 3 with shared experts that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import MULTIPLIERS, Facts
from trainer.config.tensors import of_blocks

FACTS = Facts(
    "trainer.models.granite_moe_shared.family:FAMILY",
    reads=("num_experts", "shared_experts", *MULTIPLIERS),
    tensors=of_blocks,
)
