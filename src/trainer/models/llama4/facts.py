"""The properties of Llama 4 that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.family import Facts
from trainer.config.tensors import of_blocks

FACTS = Facts(
    "trainer.models.llama4.family:FAMILY",
    reads=(
        *("num_experts", "shared_experts", "nope_layer_interval", "chunk_attn_window_size", "temperature_tuning"),
        *("temperature_tuning_scale", "temperature_tuning_floor_scale"),
    ),
    fixes={"rope_interleave": True, "attention_type": "global"},
    has_rest=True,
    maxtext_words={"rope_use_scale=false": "rope_type=default"},
    tensors=of_blocks,
)
