"""Learning-rate schedules against the closed forms in their docstring."""

import math

import numpy as np
import pytest
from support import tiny_config

from trainer.optim.schedule import make_schedule

PEAK, FINAL = 0.02, 0.005
LENGTH, WARMUP = 40, 8  # in updates


def rates(count=LENGTH, **overrides):
    """Returns the learning rates of the first `count` updates."""
    settings = {
        "learning_rate": PEAK,
        "learning_rate_final_fraction": FINAL / PEAK,
        "steps": LENGTH,
        "warmup_steps_fraction": WARMUP / LENGTH,
        "wsd_decay_steps_fraction": 0.25,
        "wsd_decay_style": "linear",
    }
    schedule = make_schedule(tiny_config("nnx", **(settings | overrides)))
    return np.array([float(schedule(i)) for i in range(count)])


def line(share):
    return PEAK + (FINAL - PEAK) * share


def half_cosine(share):
    return FINAL + (PEAK - FINAL) * (1 + math.cos(math.pi * share)) / 2


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_is_a_line_that_ends_at_the_peak(kind):
    close(rates(lr_schedule_type=kind)[:WARMUP], [PEAK * (i + 1) / WARMUP for i in range(WARMUP)])


@pytest.mark.parametrize(("kind", "shape"), [("cosine", half_cosine), ("linear", line)])
@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_decay_ends_at_the_last_update_and_the_rate_stays(kind, shape, warmup):
    found = rates(LENGTH + 5, lr_schedule_type=kind, warmup_steps_fraction=warmup / LENGTH)
    first, last = max(warmup - 1, 0), LENGTH - 1  # the last update at the peak, and the first update at the final rate
    close(found[first:LENGTH], [shape((i - first) / (last - first)) for i in range(first, LENGTH)])
    close(found[last:], [FINAL] * 6)


def test_constant_stays_at_the_peak():
    close(rates(LENGTH + 5, lr_schedule_type="constant")[WARMUP:], [PEAK] * (LENGTH + 5 - WARMUP))


@pytest.mark.parametrize(("style", "shape"), [("linear", line), ("cosine", half_cosine)])
@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_wsd_keeps_the_peak_and_decays_at_the_end(style, shape, warmup):
    settings = {"lr_schedule_type": "wsd", "wsd_decay_style": style, "warmup_steps_fraction": warmup / LENGTH}
    found = rates(LENGTH + 5, **settings)
    decay = 10
    start = LENGTH - 1 - decay  # the last update at the peak, followed by ten that decay
    close(found[warmup : start + 1], [PEAK] * (start + 1 - warmup))
    close(found[start:LENGTH], [shape(i / decay) for i in range(decay + 1)])
    close(found[LENGTH:], [FINAL] * 5)


def test_wsd_without_a_stable_part():
    found = rates(LENGTH + 2, lr_schedule_type="wsd", warmup_steps_fraction=0.5, wsd_decay_steps_fraction=0.5)
    close(found[:20], [PEAK * (i + 1) / 20 for i in range(20)])
    close(found[20:], [line(min((i + 1) / 20, 1)) for i in range(22)])


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_a_warm_up_of_the_whole_schedule(kind):
    found = rates(LENGTH + 4, lr_schedule_type=kind, warmup_steps_fraction=1.0, wsd_decay_steps_fraction=0.0)
    close(found[:LENGTH], [PEAK * (i + 1) / LENGTH for i in range(LENGTH)])
    close(found[LENGTH:], [PEAK] * 4)  # no update remains for the decay


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_an_almost_whole_warm_up_ends_at_the_final_rate(kind):
    close(rates(LENGTH, lr_schedule_type=kind, warmup_steps_fraction=(LENGTH - 1) / LENGTH)[-2:], [PEAK, FINAL])


def test_wsd_without_a_decay_stays_at_the_peak():
    close(
        rates(LENGTH + 2, lr_schedule_type="wsd", wsd_decay_steps_fraction=0)[WARMUP:], [PEAK] * (LENGTH + 2 - WARMUP)
    )


def test_a_fraction_is_not_rounded_down_by_its_binary_form():
    found = rates(100, steps=100, warmup_steps_fraction=0.29)  # 100 * 0.29 is 28.999...
    close(found[:29], [PEAK * (i + 1) / 29 for i in range(29)])


@pytest.mark.parametrize("length", [LENGTH // 2, LENGTH * 2])
def test_the_schedule_has_a_length_of_its_own(length):
    asked = rates(LENGTH * 2, steps=LENGTH, learning_rate_schedule_steps=length)
    close(asked, rates(LENGTH * 2, steps=length))
    assert not np.allclose(asked, rates(LENGTH * 2))


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0.0, 0.34, 0.5, 1.0])
def test_tiny_lengths(kind, length, warmup):
    """Rates stay between 0 and the peak. They end at the final rate, or at the peak if no update is left to decay."""
    settings = {"lr_schedule_type": kind, "steps": length, "warmup_steps_fraction": warmup}
    found = rates(length + 3, **settings, wsd_decay_steps_fraction=1 - warmup)
    assert np.isfinite(found).all()
    assert (found > 0).all()
    assert found.max() <= PEAK * (1 + 1e-6)
    close(found.max(), PEAK)
    left = length - max(int(length * warmup + 1e-6), 1)
    if kind == "wsd":
        left = min(left, int(length * (1 - warmup) + 1e-6))
    close(found[-1], PEAK if kind == "constant" or left == 0 else FINAL)
