"""The window of each layer's attention."""

from trainer.config.family import facts_of, reads
from trainer.config.keys import Config

# The keys that a family with alternating layers fixes (`Facts.fixes`), because the period determines its windows.
ALTERNATING = {"attention_type": "global"}


def windows(config: Config) -> tuple[int, ...]:
    """Returns the window of each layer in one period of layers, in tokens; 0: the whole document."""
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
    """Returns n if every n-th layer has no window and the others have one; 0 if the layers do not alternate."""
    facts = facts_of(config)
    return (config.sliding_window_pattern or facts.period) if facts and facts.period else 0


def has_window(config: Config) -> bool:
    """Returns whether the attention of some layer has a window."""
    return any(windows(config))


def needs_window(config: Config) -> bool:
    """Returns whether some layer should have a window, even if `sliding_window_size` is 0."""
    return period(config) > 1 or (not period(config) and config.attention_type == "local_sliding")
