"""Which steps are spikes, against NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config

from trainer.optim.rules import Seen
from trainer.optim.spikes import skip_spikes

INTERVAL, FACTOR = 16, 4.0


def simulated(losses, norms, interval, factor):
    """Returns which steps are accepted, and the accepted steps since the statistics last restarted, in float64."""
    kept, taken, skipped = [], [], 0
    for pair in zip(losses, norms, strict=True):
        window = np.array(kept[-interval:], np.float64)
        stuck = skipped >= interval // 2
        spike = not stuck and len(kept) >= interval // 2 and (pair > window.mean(0) + factor * window.std(0)).any()
        taken.append(bool(np.isfinite(pair).all() and not spike))
        skipped = 0 if taken[-1] else skipped + 1
        if taken[-1]:
            kept = [*([] if stuck else kept), pair]
    return taken, kept


@functools.cache
def program(interval, factor):
    """Returns `(losses, norms, steps) -> which steps are accepted, the final statistics`."""
    keys = {"skip_step_interval": interval, "skip_step_scaling_factor": factor, "skip_step_on_spikes": True}
    rule = skip_spikes(tiny_config("nnx", **keys))

    def one(state, seen):
        new, reasons = rule.observe(state, seen)
        taken = jnp.isfinite(seen.loss) & ~jnp.stack(list(reasons.values())).any()
        return jax.tree.map(lambda new, old: jnp.where(taken, new, old), new, state), taken  # as in the training step

    return jax.jit(lambda *each: jax.lax.scan(one, rule.init(None), Seen(*each)))


def decided(losses, norms, first=0, interval=INTERVAL, factor=FACTOR):
    """Returns which steps the rule accepts, and its final statistics, for steps that start at `first`."""
    state, taken = program(interval, factor)(losses, norms, first + np.arange(len(losses), dtype=np.int32))
    return taken.tolist(), state


def noise(count, level=3.0, seed=0):
    rng = np.random.default_rng(seed)
    losses, norms = level + 0.1 * rng.normal(size=count), 1 + 0.2 * rng.normal(size=count)
    return losses.astype(np.float32), norms.astype(np.float32)


def check(losses, norms, first=0):
    """Checks decisions and statistics against NumPy. Returns the skipped steps."""
    taken, state = decided(losses, norms, first)
    expected, kept = simulated(losses, norms, INTERVAL, FACTOR)
    assert taken == expected
    assert state.accepted == len(kept)
    known = min(len(kept), INTERVAL)
    assert known == INTERVAL, "the whole window is of these steps"
    np.testing.assert_array_equal(np.sort(state.loss), np.sort([loss for loss, _ in kept[-INTERVAL:]]))
    np.testing.assert_array_equal(np.sort(state.grad_norm), np.sort([norm for _, norm in kept[-INTERVAL:]]))
    return [i for i, is_taken in enumerate(taken) if not is_taken]


def test_decisions_and_statistics_equal_numpy():
    losses, norms = noise(200)
    losses[[1, 50, 51, 120]] += 4  # step 1 comes before there are statistics
    norms[[30, 51, 160]] += 3
    norms[10] = 2.1  # slightly above the bound from the ten steps so far, less than an interval
    losses[90] = np.nan
    assert check(losses, norms) == [10, 30, 50, 51, 90, 120, 160]


def test_a_new_level_is_accepted_after_half_an_interval():
    (low, norms), (high, _) = noise(60), noise(60, level=8, seed=1)
    losses = np.concatenate([low, high])
    losses[110] += 4  # a spike on the new level
    # As if the optimizer had been reset: the window is empty, but the step count is not 0.
    assert check(losses, np.concatenate([norms, norms]), first=1000) == [*range(60, 60 + INTERVAL // 2), 110]


@pytest.mark.parametrize("interval", [8, 9, 128])
def test_no_run_stands_still(interval):
    """Holds for any sequence of losses, even with the smallest factor."""
    count = 10 * interval
    rng = np.random.default_rng(0)
    losses = {
        "explodes": np.exp(np.linspace(0, 50, count)),
        "levels": np.repeat(rng.normal(size=10) * 100, interval),
        "constant, then constant": np.repeat([1.0, 2.0], count // 2),
        "random walk": np.cumsum(rng.normal(size=count)),
        "rises before every end of an interval": np.arange(count) // (interval // 2 + 1) * 10.0,
    }
    for name, loss in losses.items():
        taken, _ = decided(loss.astype(np.float32), np.ones(count, np.float32), interval=interval, factor=1e-6)
        in_a_row = [len(list(group)) for is_taken, group in itertools.groupby(taken) if not is_taken]
        assert max(in_a_row, default=0) <= interval // 2, name
        assert sum(taken) >= count // 2 - interval, name
