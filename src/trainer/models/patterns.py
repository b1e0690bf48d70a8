"""Stacks with a repeating pattern of different layers."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.capabilities.windows import windows
from trainer.config.errors import shortened
from trainer.config.keys import Config
from trainer.layers.stack import MakeBlock, Stack

LAYERS, REMAINDER = "layers", "layers_remainder"


def repeated(blocks: Sequence[MakeBlock], layers: int) -> list[Stack]:
    """Returns two stacks with `layers` layers, which repeat `blocks`: the complete repetitions, and the remainder."""
    count, rest = divmod(layers, len(blocks))
    return [Stack(LAYERS, tuple(blocks), count), Stack(REMAINDER, tuple(blocks[:rest]), 1)]


def alternating(block: MakeBlock, config: Config) -> list[Stack]:
    """Returns the stacks of layers that differ only in `window`, an argument of `block` (see `llama2.block.Block`)."""
    blocks = [functools.partial(block, window=window) for window in windows(config)]
    return repeated(blocks, config.base_num_decoder_layers)


def other_period(config: Config, period: int) -> list[str]:
    """Returns a list with the reason why MaxText cannot compute the layers. Returns [] if, as in MaxText, every
    `period`-th layer has no window."""
    every = config.sliding_window_pattern
    return [] if every == period else [f"sliding_window_pattern={every}: MaxText always uses {period}"]


def rotated(every: int, layers: int) -> list[int]:
    """Returns config.json's `no_rope_layers`: 0 for each layer without RoPE (every n-th), 1 for the other layers.
    `every`: n; -1: all layers have RoPE."""
    return [int(every == -1 or (i + 1) % every != 0) for i in range(layers)]


def read_unrotated(said: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    """Reads `nope_layer_interval`; see `HuggingFace.read`. As in transformers, `no_rope_layers` overrides
    `no_rope_layer_interval`."""
    every, given = said["no_rope_layer_interval"], said.get("no_rope_layers")
    if given is None:
        return {"nope_layer_interval": every}
    every = given.index(0) + 1 if 0 in given else -1
    if len(given) != said["num_hidden_layers"] or given != rotated(every, len(given)):
        refused.append(f"no_rope_layers={shortened(str(given))} (known: 0 for every n-th layer, and 1 for the others)")
    return {"nope_layer_interval": every}
