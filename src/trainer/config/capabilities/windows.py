"""The attention window of each layer."""

from trainer.config.family import facts_of, reads
from trainer.config.keys import Config

# `Facts.fixes` for families in which layers with and without a window alternate. In such a family, `Facts.period`
# determines which layers have a window, so attention_type is fixed.
ALTERNATING = {"attention_type": "global"}


def windows(config: Config) -> tuple[int, ...]:
    """Returns the windows, in tokens, of the layers in one period; all periods are equal. 0: a layer attends to the
    whole document."""
    size, facts = config.sliding_window_size, facts_of(config)
    if reads(config, "chunk_attn_window_size"):
        chunk, every = config.chunk_attn_window_size, config.nope_layer_interval
        return (chunk,) if every == -1 else (chunk,) * (every - 1) + (0,)
    if facts and facts.period:
        return (size,) * (period(config) - 1) + (0,)
    return (size if config.attention_type == "local_sliding" else 0,)


def in_chunks(config: Config) -> bool:
    """Returns whether windows are chunks: a token attends only within its chunk (`ops.attention.Mask.in_chunks`).

    Every `nope_layer_interval`-th layer is an exception: it has no rotary positions and attends to the whole document.
    """
    return reads(config, "chunk_attn_window_size") and config.chunk_attn_window_size > 0


def period(config: Config) -> int:
    """Returns n if every n-th layer has no window and all other layers have one; 0 if the layers do not alternate."""
    facts = facts_of(config)
    return (config.sliding_window_pattern or facts.period) if facts and facts.period else 0


def has_window(config: Config) -> bool:
    """Returns whether the attention of some layer has a window."""
    return any(windows(config))


def needs_window(config: Config) -> bool:
    """Returns whether some layer uses `sliding_window_size`, which must then be above 0."""
    return period(config) > 1 or (not period(config) and config.attention_type == "local_sliding")
