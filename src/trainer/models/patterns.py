"""Stacks of layers of several kinds, which repeat."""

import functools
from collections.abc import Sequence

from trainer.config.capabilities.windows import windows
from trainer.config.keys import Config
from trainer.layers.stack import MakeBlock, Stack

LAYERS, REMAINDER = "layers", "layers_remainder"


def repeated(blocks: Sequence[MakeBlock], layers: int) -> list[Stack]:
    """Returns the stacks of `layers` layers, which are `blocks` again and again: whole repetitions, then the rest."""
    count, rest = divmod(layers, len(blocks))
    return [Stack(LAYERS, tuple(blocks), count), Stack(REMAINDER, tuple(blocks[:rest]), 1)]


def alternating(block: MakeBlock, config: Config) -> list[Stack]:
    """Returns the stacks of layers that differ in their windows; `block` takes `window`, see `llama2.block.Block`."""
    blocks = [functools.partial(block, window=window) for window in windows(config)]
    return repeated(blocks, config.base_num_decoder_layers)


def other_period(config: Config, period: int) -> list[str]:
    """Returns why MaxText cannot compute another pattern of layers than one without a window in `period`."""
    every = config.sliding_window_pattern
    return [] if every == period else [f"sliding_window_pattern={every}: {period} is fixed in its code"]
