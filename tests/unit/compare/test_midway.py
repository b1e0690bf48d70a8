"""The state in the middle of a run: which faults of the spike rule it reveals."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.compare.midway import midway
from trainer.optim import spikes
from trainer.optim.rules import Seen

LOSS, NORM, STEPS = 8.3, 0.7, 20


def test_each_island_has_what_a_run_of_its_own_would_have():
    config = SimpleNamespace(skip_step_interval=4, learning_rate_schedule_steps=STEPS, init_weights_seed=0)
    config.skip_step_scaling_factor = 6.0
    prefix = f"opt_state/rules/{spikes.NAME}/"
    own = {"step": np.int32(1), "opt_state/mu/w": np.array([0.5, -2.0], np.float32), "rest/seen": np.ones(3)}
    own |= {f"{prefix}{name}": np.array([LOSS, 0, 0, 0], np.float32) for name in ("loss", "grad_norm")}
    own |= {f"{prefix}accepted": np.int32(1)}
    islands = [own, {name: np.asarray(2 * value, value.dtype) for name, value in own.items()}]
    first = {f"inner_state/{name}": np.stack([island[name] for island in islands]) for name in own}
    first |= {"inner_state/params/w": np.arange(2.0), "in_flight": np.int32(1), "step": np.int32(1)}
    later = midway(first, config)
    for number, island in enumerate(islands):
        for name, value in midway(island, config).items():
            np.testing.assert_array_equal(later[f"inner_state/{name}"][number], value, err_msg=name)
    assert later["step"] == later["inner_state/step"][1] == STEPS // 2
    for name in ("inner_state/params/w", "in_flight"):
        np.testing.assert_array_equal(later[name], first[name])


@pytest.mark.parametrize("factor", [1e-3, 1.0, 6.0, 60.0, 4e3])
@pytest.mark.parametrize("interval", [8, 128])
def test_the_spike_rule_accepts_a_step_like_the_first_only_with_both_statistics(factor, interval):
    config = SimpleNamespace(
        skip_step_interval=interval,
        skip_step_scaling_factor=factor,
        learning_rate_schedule_steps=STEPS,
        init_weights_seed=0,
    )
    rule = spikes.skip_spikes(config)

    @jax.jit
    def observe(window, step):
        return rule.observe(window, Seen(jnp.float32(LOSS), jnp.float32(NORM), step))

    first, _ = observe(jax.tree.map(np.asarray, rule.init({})), np.int32(0))
    prefix = f"opt_state/rules/{spikes.NAME}/"
    later = midway({prefix + name: leaf for name, leaf in first._asdict().items()}, config)
    window = spikes.Window(**{name.removeprefix(prefix): leaf for name, leaf in later.items()})
    after, reasons = observe(window, np.int32(STEPS // 2))
    assert not any(reasons.values())
    assert after.accepted == STEPS // 2 + interval + 1
    for values, own in ((later[prefix + "loss"], LOSS), (later[prefix + "grad_norm"], NORM)):
        mean, deviation = values.mean(dtype=np.float64), values.std(dtype=np.float64)
        assert mean < own < mean + factor * deviation < 2 * own
        assert factor * deviation < own
