"""The key `num_vocab_tiling`: the number of tiles of tokens for which logits and loss are computed, one tile after
another."""

import math
from collections.abc import Iterable
from typing import Any

from trainer.config.derived import mesh_axes
from trainer.config.key_rows import Resume, Row
from trainer.config.keys import Config
from trainer.config.numbers import around, divisors
from trainer.config.rules import make_rules
from trainer.config.sizes import BYTES
from trainer.config.words import sized

AUTOMATIC = -1
_SUM_BYTES = 4  # bytes per entry of the head's gradient, which is summed over tiles in float32
_TOKENS = ("activation_batch", "activation_length")


def choose_tiles(values: Config) -> list[str]:
    """Replaces a `num_vocab_tiling` of -1 in `values`. The mesh and batch sizes must be filled in and consistent.

    Returns:
      If `num_vocab_tiling` is not -1: one line for each kind of batch whose number of tokens per device is not a
      multiple of `num_vocab_tiling`.
    """
    asked, tokens = values.num_vocab_tiling, _tokens_per_device(values)
    if asked == AUTOMATIC:
        values.num_vocab_tiling = worthwhile_tiles(values)
        return []
    return [
        f"num_vocab_tiling={asked}: {count} tokens per device in {what} are not a multiple of it; "
        f"nearest: {around(asked, divisors(*tokens.values()))}"
        for what, count in tokens.items()
        if count % asked
    ]


def worthwhile_tiles(config: Config) -> int:
    """Returns the number of tiles that -1 selects; 1 if tiling does not save more memory than it costs.

    Tiling saves memory for logits and costs memory for a float32 gradient of the head. A number of tiles is suitable if
    it divides the number of tokens, saves more memory than the gradient takes, and is not so large that the products of
    a tile would be too small. The result is the smallest suitable number with which the logits of a tile take at most
    half the memory of the gradient. If there is none, the result is the largest suitable number, or 1 if no number is
    suitable.

    Args:
      config: a configuration with consistent mesh and batch sizes.
    """
    logits, waiting = tile_bytes(config)
    fewest = 2 * logits / waiting
    fitting = [n for n in divisors(*_tokens_per_device(config).values()) if n <= _most(logits, waiting)]
    by_preference = [*(n for n in fitting if n >= fewest), *(n for n in reversed(fitting) if n < fewest)]
    return next((n for n in by_preference if logits - logits / n > waiting), 1)


def _most(logits: int, waiting: int) -> int:
    """Returns the largest number of tiles with which the matrix products of a tile are not too small to be efficient.

    `logits` and `waiting`: the bytes of the logits and of the gradient, from `tile_bytes`. With the largest number, the
    logits of a tile take about an eighth of the gradient's bytes.
    """
    return 8 * logits // waiting


def tile_bytes(config: Config) -> tuple[int, int]:
    """Returns the bytes per device of the logits of a whole microbatch, and of the head's float32 gradient.

    Only tiling needs the float32 gradient, in which it sums the gradients of all tiles of a device. A TPU overwrites
    the logits with their gradient; other platforms may need memory for both.
    """
    rules, mesh = make_rules(config.logical_axis_rules), mesh_axes(config)
    tokens = next(iter(_tokens_per_device(config).values()))
    over_tokens = {axis for name in _TOKENS for axis in rules[name]}

    def parts(axes: Iterable[str]) -> int:
        return math.prod(mesh[axis] for axis in axes)

    logits = tokens * config.vocab_size // parts(rules["activation_vocab"]) * BYTES[config.dtype]
    entries = config.vocab_size * config.base_emb_dim
    return logits, entries // parts({*rules["vocab"], *rules["embed"]} - over_tokens) * _SUM_BYTES


def chosen(asked: Any, config: Config) -> list[str]:
    """Returns a list with one line about the number of tiles; [] if the number was not chosen automatically.

    `asked`: the configuration before resolving, in which num_vocab_tiling=-1 asks for an automatic choice. `config`:
    the resolved configuration, with the number that was chosen.
    """
    if asked["num_vocab_tiling"] != AUTOMATIC:
        return []
    tiles, (logits, waiting) = config.num_vocab_tiling, tile_bytes(config)
    if tiles == 1:
        within = "" if logits <= waiting else f" up to {_most(logits, waiting)} that divides the tokens"
        return [
            f"num_vocab_tiling={AUTOMATIC}: 1, no tiles: logits take {sized(logits)} per device, and no number "
            f"of tiles{within} "
            f"saves more than the {sized(waiting)} that the head's gradient would add"
        ]
    tokens = next(iter(_tokens_per_device(config).values())) // tiles
    return [
        f"num_vocab_tiling={AUTOMATIC}: {tiles} tiles of {tokens:,} tokens per device: logits take "
        f"{sized(logits // tiles)} instead of {sized(logits)}, and the head's gradient {sized(waiting)}; "
        "this is only for head and loss: the peak memory of a step may not shrink; compare with trainer.train_compile"
    ]


def _tokens_per_device(values: Any) -> dict[str, int]:
    """Returns a dict from each kind of batch, in words, to the number of its tokens whose logits one device
    computes."""
    rules, mesh = make_rules(values.logical_axis_rules), mesh_axes(values)
    rows, lengths = (math.prod(mesh[axis] for axis in rules[name]) for name in _TOKENS)
    length = values.max_target_length // lengths
    keys = {"a microbatch": "per_device_batch_size"}
    if values.eval_interval > 0 and values.eval_per_device_batch_size % values.per_device_batch_size:
        keys["an evaluation batch"] = "eval_per_device_batch_size"
    devices = math.prod(mesh.values())
    return {what: round(values[key] * devices) // rows * length for what, key in keys.items()}


ROWS = (Row(("num_vocab_tiling",), Resume.LAYOUT),)
