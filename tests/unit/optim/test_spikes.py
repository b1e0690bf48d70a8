"""Which steps are spikes, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from support import tiny_config

from trainer.optim import Seen
from trainer.optim.spikes import skip_spikes

INTERVAL, FACTOR = 16, 4.0


def simulated(losses, norms, interval, factor):
    """Which steps are taken, and the last of them, in float64."""
    kept, taken = [], []
    for pair in zip(losses, norms, strict=True):
        window = np.array(kept[-interval:], np.float64)
        spike = len(kept) >= interval // 2 and (pair > window.mean(0) + factor * window.std(0)).any()
        taken.append(bool(np.isfinite(pair).all() and not spike))
        if taken[-1]:
            kept.append(pair)
    return taken, kept[-interval:]


def test_decisions_and_statistics_equal_numpy():
    rng = np.random.default_rng(0)
    losses, norms = 3 + 0.1 * rng.normal(size=200), 1 + 0.2 * rng.normal(size=200)
    losses[[1, 50, 51, 120]] += 4  # the first while there are no statistics
    norms[[30, 51, 160]] += 3
    norms[10] = 2.1  # a little above the bound of the ten steps before, which are no whole interval
    losses[90] = np.nan
    losses, norms = losses.astype(np.float32), norms.astype(np.float32)
    keys = {"skip_step_interval": INTERVAL, "skip_step_scaling_factor": FACTOR, "skip_step_on_spikes": True}
    rule = skip_spikes(tiny_config("nnx", **keys))
    observe = jax.jit(rule.observe)
    state, taken = rule.init(None), []
    for loss, norm in zip(losses, norms, strict=True):
        new, accept = observe(state, Seen(jnp.asarray(loss), jnp.asarray(norm)))
        taken.append(bool(accept & np.isfinite(loss)))
        state = new if taken[-1] else state  # what the step's select does
    expected, kept = simulated(losses, norms, INTERVAL, FACTOR)
    assert taken == expected
    assert [i for i, is_taken in enumerate(expected) if not is_taken] == [10, 30, 50, 51, 90, 120, 160]
    assert state.accepted == sum(expected)
    np.testing.assert_array_equal(np.sort(state.loss), np.sort([loss for loss, _ in kept]))
    np.testing.assert_array_equal(np.sort(state.grad_norm), np.sort([norm for _, norm in kept]))
