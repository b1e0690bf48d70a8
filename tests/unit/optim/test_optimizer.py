"""Updates against numpy, and which parameters are decayed, clipped and trained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import assert_equal_bits, tiny_config

from trainer.config import UserError
from trainer.optim import make_optimizer, make_schedule, trainable

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


def names(params):
    return [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree_util.tree_leaves_with_path(params)]


def trained_params(config):
    """Parameters after STEPS updates by `make_optimizer`, and its last state. The second gradient is below the clip."""
    params = tree(0)
    tx = make_optimizer(config, params)  # of axes it reads the names alone
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(STEPS):
        updates, state = update(gradient(step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def gradient(step):
    return jax.tree.map(lambda g: g * np.float32(0.1 if step == 1 else 1.0), tree(step + 1))


def clipped(grads, threshold):
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads))
    return [g * min(1.0, threshold / norm) for g in grads]


def adamw(config, decayed=(True, True, True), trained=(True, True, True)):
    """Algorithm 2 of Loshchilov and Hutter 2019, in float64; the decay is multiplied by the rate, as in optax."""
    schedule = make_schedule(config)
    params = [p.astype(np.float64) for p in jax.tree.leaves(tree(0))]
    mean, square = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]
    for step in range(STEPS):
        grads = [g for g, moves in zip(jax.tree.leaves(gradient(step)), trained, strict=True) if moves]
        threshold = config.gradient_clipping_threshold
        left = iter(clipped(grads, threshold) if threshold else grads)
        for i in range(3):
            if not trained[i]:
                continue
            grad = next(left)
            mean[i] = B1 * mean[i] + (1 - B1) * grad
            square[i] = B2 * square[i] + (1 - B2) * grad**2
            m, v = mean[i] / (1 - B1 ** (step + 1)), square[i] / (1 - B2 ** (step + 1))
            direction = m / (np.sqrt(v + EPS_ROOT) + EPS) + decayed[i] * DECAY * params[i]
            params[i] = params[i] - float(schedule(step)) * direction
    return params


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_the_gradients_are_really_clipped_once_and_once_not():
    norms = [float(optax.tree.norm(gradient(step))) for step in range(STEPS)]
    assert norms[1] < CLIP < min(norms[0], *norms[2:])


@pytest.mark.parametrize("clip", [CLIP, 0.0])
def test_adamw_equals_numpy(clip):
    config = config_of(gradient_clipping_threshold=clip)
    assert_close(trained_params(config)[0], adamw(config))


@pytest.mark.parametrize(
    ("patterns", "decayed"),
    [
        ("[scale]", (False, True, True)),
        ("[^token_embedder, norm/scale$]", (False, True, False)),
        ("['layers/.*/kernel']", (True, False, True)),
    ],
)
def test_adamw_mask_names_what_is_not_decayed(patterns, decayed):
    assert names(tree(0)) == [
        "decoder/decoder_norm/scale",
        "decoder/layers/mlp/wo/kernel",
        "token_embedder/embedding",
    ]
    config = config_of(adamw_mask=patterns)
    assert_close(trained_params(config)[0], adamw(config, decayed=decayed))


@pytest.mark.parametrize("clip", [CLIP, 0.0])
def test_sgd_equals_numpy(clip):
    config = config_of(opt_type="sgd", gradient_clipping_threshold=clip)
    schedule = make_schedule(config)
    expected = [p.astype(np.float64) for p in jax.tree.leaves(tree(0))]
    for step in range(STEPS):
        grads = jax.tree.leaves(gradient(step))
        for p, g in zip(expected, clipped(grads, clip) if clip else grads, strict=True):
            p -= float(schedule(step)) * g
    params, state = trained_params(config)
    assert_close(params, expected)
    assert all(leaf.ndim == 0 for leaf in jax.tree.leaves(state))  # a counter, no moments


@pytest.mark.parametrize(
    ("weights", "asked", "first"),
    [
        ("float32", "", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "", "bfloat16"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_dtypes_of_the_moments(weights, asked, first):
    """The first is mu_dtype, by default that of the weights; the second always follows the weights."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, weights), tree(0))
    state = jax.eval_shape(make_optimizer(config_of(weight_dtype=weights, mu_dtype=asked), params).init, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.tree.get(state, "mu"))} == {jnp.dtype(first)}
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.tree.get(state, "nu"))} == {jnp.dtype(weights)}


def test_frozen_parameters_stay_and_have_no_state_and_no_part_in_the_norm():
    config = config_of(trainable_parameters_mask="[wo, norm]")
    params, state = trained_params(config)
    assert_equal_bits(params["token_embedder"], tree(0)["token_embedder"])
    assert_close(params, adamw(config, trained=(True, True, False)))
    assert sorted(leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim) == [(2, 3, 4), (2, 3, 4), (4,), (4,)]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("[]", (True, True, True)),
        ("[embed]", (False, False, True)),  # searched anywhere in the name
        ("[^decoder]", (True, True, False)),
        ("[^scale]", (False, False, False)),
        ("['layers/mlp']", (False, True, False)),  # across the names of a path
        ("[scale$, 'w[io]']", (True, True, False)),  # any of several
        ("['a|scale$', ^t]", (True, True, True)),  # each pattern stands for itself
    ],
)
def test_patterns_are_searched_in_the_whole_name(patterns, expected):
    mask = trainable(config_of(trainable_parameters_mask=patterns))(tree(0))
    assert jax.tree.structure(mask) == jax.tree.structure(tree(0))
    assert tuple(jax.tree.leaves(mask)) == expected


@pytest.mark.parametrize("key", ["adamw_mask", "trainable_parameters_mask"])
def test_a_mask_that_is_found_in_no_name_is_refused(key):
    make_optimizer(config_of(**{key: "[nothing, wo]"}), tree(0))
    with pytest.raises(UserError, match=rf"(?s){key}=\[nothing,\^wo\].*decoder/layers/mlp/wo/kernel"):
        make_optimizer(config_of(**{key: "[nothing, ^wo]"}), tree(0))
