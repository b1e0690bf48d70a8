"""Optimizers and wrappers that together have every state structure."""

import jax
import optax

ADAM = optax.adamw(1e-3)


def by_rank(params):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", params)


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def muon_dimensions(params):
    def one(leaf):
        return optax.contrib.MuonDimensionNumbers((1,), (2,)) if leaf.ndim == 3 else None

    return jax.tree.map(one, params)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": ADAM,
    "masked decay": optax.adamw(1e-3, mask=is_matrix),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), ADAM),
    "adafactor": optax.adafactor(1e-3),
    "adagrad": optax.adagrad(1e-3),
    "lion": optax.lion(1e-3),
    "muon": optax.contrib.muon(1e-3, muon_weight_dimension_numbers=muon_dimensions),
    "schedule free": optax.contrib.schedule_free_adamw(1e-3),
    "multi_transform": optax.multi_transform({"matrix": ADAM, "rest": optax.sgd(0.1, momentum=0.9)}, by_rank),
    "masked": optax.masked(ADAM, is_matrix),
    "apply_if_finite": optax.apply_if_finite(ADAM, 3),
    "apply_if_finite muon": optax.apply_if_finite(
        optax.contrib.muon(1e-3, muon_weight_dimension_numbers=muon_dimensions), 3
    ),
    "multi steps": optax.MultiSteps(ADAM, 2).gradient_transformation(),
    "inject hyperparams": optax.inject_hyperparams(optax.adamw)(1e-3),
    "ema": optax.chain(ADAM, optax.ema(0.99)),
    "lookahead of noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), ADAM),
    "conditionally masked": optax.conditionally_mask(ADAM, lambda step: step < 3),
    "accumulated updates": optax.apply_every(2),
}
