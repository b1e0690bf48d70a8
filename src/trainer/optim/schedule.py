"""The learning rate as a function of the number of completed updates."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from trainer.config.keys import Config


def make_schedule(config: Config) -> optax.Schedule:
    """Returns the schedule: linear warm-up to `learning_rate`, then the shape of `lr_schedule_type`.

    The first w = N * `warmup_steps_fraction` of the N = `learning_rate_schedule_steps` updates warm up: update i,
    counted from 0, runs at (i + 1) / w of the peak, `learning_rate`. With the type `constant`, the rate then stays at
    the peak. With the other types, it falls to `learning_rate_final_fraction` of the peak at update N - 1, and stays
    there. `wsd` (warm-up, stable, decay; Hu et al. 2024, arXiv:2404.06395) decays only over the last
    N * `wsd_decay_steps_fraction` updates. If no updates remain for the decay, the rate stays at the peak.
    """
    peak, final = config.learning_rate, config.learning_rate * config.learning_rate_final_fraction
    length = config.learning_rate_schedule_steps
    warmup = _share(length, config.warmup_steps_fraction)
    start = max(warmup - 1, 0)  # the first update at the peak
    falling = length - 1 - start
    cosine = config.lr_schedule_type == "cosine"
    if config.lr_schedule_type == "constant":
        falling = 0
    elif config.lr_schedule_type == "wsd":
        falling = min(falling, _share(length, config.wsd_decay_steps_fraction))
        cosine = config.wsd_decay_style == "cosine"

    ramp = optax.linear_schedule(peak / max(warmup, 1), peak, start)
    if falling == 0:
        return optax.join_schedules([ramp, optax.constant_schedule(peak)], [start])
    fall = _cosine(peak, final, falling) if cosine else optax.linear_schedule(peak, final, falling)
    return optax.join_schedules([ramp, optax.constant_schedule(peak), fall], [start, length - 1 - falling])


def place_on_schedule(opt_state: Any, otherwise: jax.Array) -> jax.Array:
    """Returns the count of completed updates that the optimizer will next pass to its schedule, int32 [].

    Skipped steps do not count. If an optimizer has several schedules, their counts are equal. Returns `otherwise` for
    an optimizer without a schedule.
    """
    counts = [node.count for node in jax.tree.leaves(opt_state, is_leaf=_counts) if _counts(node)]
    return counts[0] if counts else otherwise


def on_schedule(opt_state: Any, change: Callable[[jax.Array], jax.Array]) -> Any:
    """Returns `opt_state` with every update count that a schedule reads replaced by `change(count)`."""
    return jax.tree.map(
        lambda node: node._replace(count=change(node.count)) if _counts(node) else node, opt_state, is_leaf=_counts
    )


def _counts(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def _share(length: int, fraction: float) -> int:
    """Returns `fraction` of `length` updates, rounded down. 0.29 of 100 is 29 despite binary rounding."""
    return int(length * fraction + 1e-6)


def _cosine(start: float, end: float, steps: int) -> optax.Schedule:
    """Returns half a cosine from `start` to `end`."""
    wave = optax.cosine_decay_schedule(1.0, steps)  # from 1 to 0
    return lambda count: end + (start - end) * wave(count)
