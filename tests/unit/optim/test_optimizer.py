"""Updates against NumPy, and which parameters are decayed, clipped and trained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiler import EXACT
from optim_cases import (
    AXES,
    B1,
    B2,
    CLIP,
    DECAY,
    EPS,
    EPS_ROOT,
    STEPS,
    assert_close,
    clipped,
    config_of,
    gradient,
    names,
    trained_params,
    tree,
)
from support import assert_equal_bits

from trainer.config.capabilities.optimizers import TRAITS
from trainer.config.errors import UserError
from trainer.ops.paths import by_name
from trainer.optim.optimizer import make_optimizer, trainable
from trainer.optim.schedule import make_schedule


def adamw(config, decays=(False, True, True), trained=(True, True, True)):
    """Algorithm 2 of Loshchilov and Hutter 2019, in float64, with the decay multiplied by the rate, as in optax."""
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
            direction = m / (np.sqrt(v + EPS_ROOT) + EPS) + decays[i] * DECAY * params[i]
            params[i] = params[i] - float(schedule(step)) * direction
    return params


def test_the_gradients_are_really_clipped_once_and_once_not():
    norms = [float(optax.tree.norm(gradient(step))) for step in range(STEPS)]
    assert norms[1] < CLIP < min(norms[0], *norms[2:])


@pytest.mark.parametrize("clip", [CLIP, 0.0])
def test_adamw_equals_numpy(clip):
    config = config_of(gradient_clipping_threshold=clip)
    assert_close(trained_params(config)[0], adamw(config))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("[scale]", (False, True, True)),
        ("[^token_embedder, norm/scale$]", (False, True, False)),
        ("['layers/.*/kernel']", (True, False, True)),
        ("[]", (True, True, True)),
        ("none", (False, True, True)),  # the default: norms and biases
    ],
)
def test_adamw_mask_names_what_is_not_decayed(patterns, expected):
    assert names(tree(0)) == [
        "decoder/decoder_norm/scale",
        "decoder/layers/mlp/wo/kernel",
        "token_embedder/embedding",
    ]
    config = config_of(adamw_mask=patterns)
    assert_close(trained_params(config)[0], adamw(config, decays=expected))


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
    """The first moment has mu_dtype, by default the dtype of the weights; the second is float32."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, weights), tree(0))
    state = jax.eval_shape(make_optimizer(config_of(weight_dtype=weights, mu_dtype=asked), AXES).init, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.tree.get(state, "mu"))} == {jnp.dtype(first)}
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.tree.get(state, "nu"))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("opt_type", TRAITS)
def test_every_optimizer_computes_in_float32_and_keeps_only_first_moments_in_mu_dtype(opt_type):
    """For bfloat16 parameters, state and updates equal those of the same values in float32. A bfloat16 second moment
    would stop changing."""
    config = config_of(opt_type=opt_type, weight_dtype="bfloat16", adafactor_min_dim_size_to_factor=2)
    tx = make_optimizer(config, AXES)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree(0))
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float32), narrow)
    update = jax.jit(lambda params: tx.update(gradient(0), tx.init(params), params), compiler_options=EXACT)
    found, expected = update(narrow), update(wide)
    assert_equal_bits(found, expected)
    updates, state = found
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    for name, leaf in by_name(state).items():
        first = opt_type != "adam_pax" and {"mu", "ema", "trace"} & {*name.split("/")}
        assert leaf.dtype == ("bfloat16" if first else "float32") or not leaf.ndim, name


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
        ("[embed]", (False, False, True)),  # matches anywhere in the name
        ("[^decoder]", (True, True, False)),
        ("[^scale]", (False, False, False)),
        ("['layers/mlp']", (False, True, False)),  # matches across path components
        ("[scale$, 'w[io]']", (True, True, False)),  # matches any of several patterns
        ("['a|scale$', ^t]", (True, True, True)),  # each pattern is matched separately
    ],
)
def test_patterns_are_searched_in_the_whole_name(patterns, expected):
    mask = trainable(config_of(trainable_parameters_mask=patterns))(tree(0))
    assert jax.tree.structure(mask) == jax.tree.structure(tree(0))
    assert tuple(jax.tree.leaves(mask)) == expected


@pytest.mark.parametrize("key", ["adamw_mask", "trainable_parameters_mask"])
def test_a_mask_that_is_found_in_no_name_is_refused(key):
    make_optimizer(config_of(**{key: "[nothing, wo]"}), AXES)
    with pytest.raises(UserError, match=rf"(?s){key}=\[nothing,\^wo\].*decoder/layers/mlp/wo/kernel"):
        make_optimizer(config_of(**{key: "[nothing, ^wo]"}), AXES)
