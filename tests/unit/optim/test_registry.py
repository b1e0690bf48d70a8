"""Every optimizer against NumPy in float64, and which keys it reads."""

import jax
import numpy as np
import pytest
from optim_cases import (
    AXES,
    B1,
    B2,
    DECAY,
    EPS,
    EPS_ROOT,
    STEPS,
    assert_close,
    config_of,
    gradient,
    trained_params,
    tree,
)

from trainer.config.capabilities.optimizers import TRAITS
from trainer.config.schema import schema
from trainer.optim.keys import Given, keys_of
from trainer.optim.optimizer import decayed
from trainer.optim.registry import OPTIMIZERS
from trainer.optim.schedule import make_schedule

DECAYED = (False, True, True)  # the leaves of AXES: a norm, a matrix, an embedding


def rms(x):
    return np.sqrt((x**2).mean())


def adam_pax(grads, params, rates, decays):
    """Averages all gradients so far by an explicit sum, with weights b^(t - i) normalized to sum 1."""
    for t, rate in enumerate(rates, start=1):
        w1, w2 = (b ** np.arange(t - 1, -1, -1.0) for b in (B1, B2))
        mean = sum(w * g for w, g in zip(w1 / w1.sum(), grads, strict=False))
        square = sum(w * g**2 for w, g in zip(w2 / w2.sum(), grads, strict=False))
        params = params - rate * (mean / (np.sqrt(square + EPS_ROOT) + EPS) + decays * DECAY * params)
    return params


def nadamw(grads, params, rates, decays):
    m = v = 0
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        ahead = B1 * m / (1 - B1 ** (t + 1)) + (1 - B1) * g / (1 - B1**t)
        direction = ahead / (np.sqrt(v / (1 - B2**t) + EPS_ROOT) + EPS)
        params = params - rate * (direction + decays * DECAY * params)
    return params


def momentum(grads, params, rates, decays):
    trace = 0
    for g, rate in zip(grads, rates, strict=True):
        trace = g + 0.7 * trace
        params = params - rate * trace
    return params


def lion(grads, params, rates, decays):
    m = 0
    for g, rate in zip(grads, rates, strict=True):
        params = params - rate * (np.sign(0.6 * m + 0.4 * g) + decays * 0.2 * params)
        m = 0.9 * m + 0.1 * g
    return params


def adafactor(grads, params, rates, decays):
    """Algorithm 4 of the paper. Rows and columns are the two longest axes of a layer, if the shorter has at least 3
    entries."""
    if params.ndim == 3:
        layers = [adafactor([g[i] for g in grads], layer, rates, decays) for i, layer in enumerate(params)]
        return np.stack(layers)
    shorter, longer = sorted(range(params.ndim), key=lambda i: params.shape[i])[-2:] if params.ndim > 1 else (0, 0)
    average = rows = columns = 0
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        beta = 1 - t**-0.6
        average = beta * average + (1 - beta) * g**2
        if params.ndim > 1:
            rows = beta * rows + (1 - beta) * (g**2).mean(longer, keepdims=True)
            columns = beta * columns + (1 - beta) * (g**2).mean(shorter, keepdims=True)
            u = g / np.sqrt(rows * columns / rows.mean(shorter, keepdims=True))
        else:
            u = g / np.sqrt(average)
        u = u / max(1, rms(u) / 0.8)
        params = params - rate * max(1e-3, rms(params)) * u - decays * 0.01 * params
    return params


CASES = {
    "adam_pax": (adam_pax, {}),
    "nadamw": (nadamw, {}),
    "sgd": (momentum, {"sgd_momentum": 0.7}),
    "lion": (lion, {"lion_b1": 0.6, "lion_b2": 0.9, "lion_weight_decay": 0.2}),
    "adafactor": (
        adafactor,
        {
            "adafactor_decay_rate": 0.6,
            "adafactor_clipping_threshold": 0.8,
            "adafactor_min_dim_size_to_factor": 3,
            "adafactor_weight_decay": 0.01,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_equals_numpy(name):
    expected, settings = CASES[name]
    config = config_of(opt_type=name, gradient_clipping_threshold=0, **settings)
    rates = [float(make_schedule(config)(step)) for step in range(STEPS)]
    grads = [jax.tree.leaves(gradient(step)) for step in range(STEPS)]
    leaves = [leaf.astype(np.float64) for leaf in jax.tree.leaves(tree(0))]
    by_hand = [
        expected([g[i].astype(np.float64) for g in grads], leaf, rates, DECAYED[i]) for i, leaf in enumerate(leaves)
    ]
    assert_close(trained_params(config)[0], by_hand)


def test_every_optimizer_has_its_keys():
    choices = schema().keys["opt_type"].choices
    assert sorted(OPTIMIZERS) == sorted(TRAITS) == sorted(choices)
    assert {key for traits in TRAITS.values() for key in traits.reads} <= set(schema().keys)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_given_its_own_keys_and_reads_all_of_them(name):
    class Counted:
        def __init__(self, keys):
            self.keys, self.seen = vars(keys), set()

        def __getattr__(self, key):
            self.seen.add(key)
            return self.keys[key]

    config = config_of(opt_type=name)
    keys = Counted(keys_of(config))
    OPTIMIZERS[name](keys, Given(make_schedule(config), decayed(config, AXES), AXES))
    # The optimizer receives the mask as `Given.decayed`.
    assert keys.seen == set(TRAITS[name].reads) - {"adamw_mask"}
