"""Skipping steps whose loss or gradient norm is far above what the last steps had."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.optim.rules import Rule, Seen

NAME = "spikes"


class Window(NamedTuple):
    """The last accepted steps, in no order that matters: step i of those accepted is at i modulo the length."""

    loss: jax.Array  # float32 [interval]
    grad_norm: jax.Array  # float32 [interval], before clipping
    accepted: jax.Array  # int32 [], how many steps in all


def skip_spikes(config: Any) -> Rule:
    """The rule that refuses a step if its loss or its gradient norm is above mean + `skip_step_scaling_factor` standard
    deviations of the last `skip_step_interval` accepted steps.

    It accepts every step until half an interval is accepted; until a whole one is, the statistics are those of what
    there is. A refused step does not enter them. Variances are divided by the number of steps.
    """
    interval, factor = config.skip_step_interval, config.skip_step_scaling_factor

    def init(params: Any) -> Window:
        del params
        return Window(jnp.zeros(interval), jnp.zeros(interval), jnp.zeros((), jnp.int32))

    def observe(state: Window, seen: Seen) -> tuple[Window, jax.Array]:
        known = jnp.arange(interval) < state.accepted
        spike = (seen.loss > _bound(state.loss, known, factor)) | (
            seen.grad_norm > _bound(state.grad_norm, known, factor)
        )
        at = state.accepted % interval
        new = Window(state.loss.at[at].set(seen.loss), state.grad_norm.at[at].set(seen.grad_norm), state.accepted + 1)
        return new, ~spike | (state.accepted < interval // 2)

    return Rule(NAME, init, observe=observe)


def _bound(values: jax.Array, known: jax.Array, factor: float) -> jax.Array:
    """mean + factor * standard deviation of the `known` of `values`, float32 []."""
    count = jnp.maximum(known.sum(), 1)
    mean = jnp.where(known, values, 0).sum() / count
    variance = jnp.where(known, (values - mean) ** 2, 0).sum() / count
    return mean + factor * jnp.sqrt(variance)
