"""Checks of the keys of attention, other than those of multi-head latent attention (`latent_keys`)."""

from collections.abc import Callable
from typing import Any

from trainer.config.capabilities.windows import needs_window
from trainer.config.family import BLOCK_KEYS, lacks, readers
from trainer.config.keys import Config
from trainer.config.schema import schema


def _window(config: Config) -> str | None:
    if needs_window(config) and not config.sliding_window_size:
        return "a sliding window needs at least one token"
    return None


def _only_some(key: str) -> Callable[[Any], str | None]:
    def problem(config: Config) -> str | None:
        if config[key] == schema().keys[key].default or not lacks(config, key):
            return None
        return f"this family does not read it; only {readers(key)} can have it"

    return problem


def _local_rope(config: Config) -> str | None:
    if config.local_rope_max_timescale == -1 or config.rope_min_timescale < config.local_rope_max_timescale:
        return None
    return "the shortest wavelength must be less than the longest"


ATTENTION_CHECKS = (
    (("decoder_block", "attention_type", "sliding_window_pattern", "sliding_window_size"), _window),
    (("rope_min_timescale", "local_rope_max_timescale"), _local_rope),
    *((("decoder_block", key), _only_some(key)) for key in BLOCK_KEYS),
)
