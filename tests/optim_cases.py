"""Several updates of small parameters, for comparison with NumPy in float64."""

import jax
import numpy as np
from support import tiny_config

from trainer.optim.optimizer import make_optimizer
from trainer.sharding import Axes

STEPS = 4
B1, B2, EPS, EPS_ROOT, DECAY, CLIP = 0.8, 0.9, 1e-3, 1e-4, 0.3, 2.0
SETTINGS = {
    "opt_type": "adamw",
    "lr_schedule_type": "cosine",
    "mu_dtype": "",
    "weight_dtype": "float32",
    "learning_rate": 0.1,
    "steps": 8,
    "warmup_steps_fraction": 0.25,
    "adam_b1": B1,
    "adam_b2": B2,
    "adam_eps": EPS,
    "adam_eps_root": EPS_ROOT,
    "adam_weight_decay": DECAY,
    "gradient_clipping_threshold": CLIP,
}


def config_of(**overrides):
    return tiny_config("nnx", **(SETTINGS | overrides))


def tree(seed):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {
        "decoder": {"layers": {"mlp": {"wo": {"kernel": normal(2, 3, 4)}}}, "decoder_norm": {"scale": normal(4)}},
        "token_embedder": {"embedding": normal(5, 4)},
    }


AXES = {
    "decoder": {
        "layers": {"mlp": {"wo": {"kernel": Axes(("layers", "mlp", "embed"))}}},
        "decoder_norm": {"scale": Axes(("norm",))},
    },
    "token_embedder": {"embedding": Axes(("vocab", "embed"))},
}


def names(params):
    return [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree_util.tree_leaves_with_path(params)]


def trained_params(config, options=None):
    """Returns the parameters after STEPS updates by `make_optimizer`, and the last optimizer state. `options` are
    compiler options. The second gradient is below the clipping threshold."""
    params = tree(0)
    tx = make_optimizer(config, AXES)
    state = tx.init(params)
    update = jax.jit(tx.update, compiler_options=options)
    for step in range(STEPS):
        updates, state = update(gradient(step), state, params)
        params = jax.tree.map(lambda old, change: old + np.asarray(change), params, updates)
    return params, state


def gradient(step):
    return jax.tree.map(lambda g: g * np.float32(0.1 if step == 1 else 1.0), tree(step + 1))


def clipped(grads, threshold):
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads))
    return [g * min(1.0, threshold / norm) for g in grads]


def assert_close(actual, expected):
    """Checks that parameters are equal up to float32 rounding accumulated over four updates of size 0.1."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
