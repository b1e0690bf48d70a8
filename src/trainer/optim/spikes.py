"""Skips steps whose loss or gradient norm is far above recent values."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.config.keys import Config
from trainer.optim.rules import Rule, Seen

NAME = "spikes"


class Window(NamedTuple):
    """The last accepted steps. Accepted step number i is stored at index i modulo the window's length."""

    loss: jax.Array  # float32 [interval]
    grad_norm: jax.Array  # float32 [interval], before clipping
    accepted: jax.Array  # int32 [], the number of accepted steps since the statistics began
    last: jax.Array  # int32 [], the step count of the last accepted step


def skip_spikes(config: Config) -> Rule:
    """Returns the rule that skips steps with a spike in the loss or the gradient norm.

    A step is skipped if its loss or gradient norm is above mean + `skip_step_scaling_factor` standard deviations of
    the last `skip_step_interval` accepted steps.

    With n = `skip_step_interval`: until n / 2 steps have been accepted, no step is tested. Until n steps have been
    accepted, the statistics cover the steps accepted so far. The statistics never include skipped steps. Variances are
    population variances (divided by the number of steps).

    After n / 2 consecutive steps that were skipped for whatever reason, the next finite step is accepted and the
    statistics restart from it, because the loss may have reached a new level. So spikes cannot stop a run forever.
    """
    interval, factor = config.skip_step_interval, config.skip_step_scaling_factor

    def init(params: Any) -> Window:
        del params
        return Window(jnp.zeros(interval), jnp.zeros(interval), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def observe(state: Window, seen: Seen) -> tuple[Window, dict[str, jax.Array]]:
        new_level = seen.step - state.last > interval // 2
        judged = (state.accepted >= interval // 2) & ~new_level
        known = jnp.arange(interval) < state.accepted
        reasons = {
            f"{name}_spike": judged & (getattr(seen, name) > _bound(getattr(state, name), known, factor))
            for name in ("loss", "grad_norm")
        }
        count = jnp.where(new_level, 0, state.accepted)
        at = count % interval
        loss, grad_norm = state.loss.at[at].set(seen.loss), state.grad_norm.at[at].set(seen.grad_norm)
        return Window(loss, grad_norm, count + 1, seen.step), reasons

    return Rule(NAME, init, observe=observe)


def _bound(values: jax.Array, known: jax.Array, factor: float) -> jax.Array:
    """Returns mean + factor * standard deviation of the `known` entries of `values`, float32 []."""
    count = jnp.maximum(known.sum(), 1)
    mean = jnp.where(known, values, 0).sum() / count
    variance = jnp.where(known, (values - mean) ** 2, 0).sum() / count
    return mean + factor * jnp.sqrt(variance)
