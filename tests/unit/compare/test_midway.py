"""The state of a run at its middle: what it shows of the spike rule."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.compare.midway import midway
from trainer.optim import spikes
from trainer.optim.rules import Seen

LOSS, NORM, STEPS = 8.3, 0.7, 20


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

    def seen(step):
        return Seen(jnp.float32(LOSS), jnp.float32(NORM), jnp.int32(step))

    first, _ = rule.observe(rule.init({}), seen(0))
    prefix = f"opt_state/rules/{spikes.NAME}/"
    later = midway({prefix + name: leaf for name, leaf in first._asdict().items()}, config)
    window = spikes.Window(**{name.removeprefix(prefix): jnp.array(leaf) for name, leaf in later.items()})
    after, reasons = rule.observe(window, seen(STEPS // 2))
    assert not any(reasons.values())
    assert after.accepted == STEPS // 2 + interval + 1
    for values, own in ((later[prefix + "loss"], LOSS), (later[prefix + "grad_norm"], NORM)):
        mean, deviation = values.mean(dtype=np.float64), values.std(dtype=np.float64)
        assert mean < own < mean + factor * deviation < 2 * own
        assert factor * deviation < own
