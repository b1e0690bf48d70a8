"""Learning rates of groups, clipping by value, and frozen parameters, for every optimizer."""

import jax
import numpy as np
import pytest
from compiler import EXACT
from optim_cases import AXES, CLIP, STEPS, clipped, config_of, gradient, names, trained_params, tree
from support import assert_equal_bits

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.optim.optimizer import make_optimizer
from trainer.optim.registry import OPTIMIZERS

DECAYS = {"lion": {"lion_weight_decay": 0.2}, "sgd": {"sgd_momentum": 0.5}, "adafactor": {"adafactor_momentum": 0.5}}


@pytest.mark.rest(covered_by="adamw and muon", cases=("adafactor", "adam_pax", "lion", "nadamw", "sgd"))
@pytest.mark.parametrize("opt_type", OPTIMIZERS)
def test_a_group_trains_with_a_rate_of_its_own(opt_type):
    keys = {"opt_type": opt_type, "gradient_clipping_threshold": 0, **DECAYS.get(opt_type, {})}
    keys |= {"weight_dtype": "float32", "adamw_mask": "[]"}
    single_rate, _ = trained_params(config_of(**keys), EXACT)
    double_rate, _ = trained_params(config_of(**keys, learning_rate=0.2), EXACT)
    groups = "['mlp/.*=2', embedding=1, decoder=2]"
    in_groups, state = trained_params(config_of(**keys, learning_rate_groups=groups), EXACT)
    # Twice the rate gives twice the update, bit for bit.
    assert_equal_bits(in_groups["decoder"], double_rate["decoder"])
    assert_equal_bits(in_groups["token_embedder"], single_rate["token_embedder"])
    slow, fast = (params["decoder"]["decoder_norm"]["scale"] for params in (single_rate, double_rate))
    assert np.any(slow != fast)
    without_groups = make_optimizer(config_of(**keys), AXES).init(tree(0))
    assert jax.tree.structure(state) == jax.tree.structure(without_groups)


def test_groups_that_no_parameter_is_in_are_refused():
    with pytest.raises(UserError) as error:
        make_optimizer(config_of(learning_rate_groups="[wo=2, kernel=3, ^scale=4]"), AXES)
    first, second, *_ = str(error.value).splitlines()
    assert "learning_rate_groups=kernel=3: matches no trained parameter that an earlier pattern does not match" in first
    assert "learning_rate_groups=^scale=4: matches no trained parameter" in second
    with pytest.raises(UserError, match="learning_rate_groups=norm=2: matches no trained"):
        make_optimizer(config_of(learning_rate_groups="[norm=2]", trainable_parameters_mask="[wo]"), AXES)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[embedding]", r"'embedding' is not pattern=factor with a factor above 0, such as embedding=0\.1$"),
        ("[a=b]", "'a=b' is not pattern=factor"),
        ("[=2]", "'=2' is not pattern=factor"),
        ("[a=0]", "; trainable_parameters_mask freezes parameters"),
        ("[a=-1]", "is not pattern=factor"),
        ("[a=inf]", "is not pattern=factor"),
        ("['(=1']", r"'\(' is not a regular expression"),
    ],
)
def test_what_is_no_group_is_refused(value, message):
    with pytest.raises(UserError, match=message):
        load(["base.yml", "dataset_type=synthetic", f"learning_rate_groups={value}"])


def test_elements_are_clipped_before_the_norm():
    value = 0.5
    config = config_of(opt_type="sgd", gradient_clipping_value=value, lr_schedule_type="constant")
    rates = [0.05, 0.1, 0.1, 0.1]  # two warm-up steps
    expected = [leaf.astype(np.float64) for leaf in jax.tree.leaves(tree(0))]
    for step in range(STEPS):
        grads = [np.clip(g, -value, value) for g in jax.tree.leaves(gradient(step))]
        for p, g in zip(expected, clipped(grads, CLIP), strict=True):
            p -= rates[step] * g
    assert np.sqrt(sum((g**2).sum() for g in grads)) > CLIP
    for found, leaf in zip(jax.tree.leaves(trained_params(config)[0]), expected, strict=True):
        np.testing.assert_allclose(found, leaf, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("opt_type", OPTIMIZERS)
def test_frozen_parameters_have_no_state_of_any_optimizer(opt_type):
    keys = {"opt_type": opt_type, "mu_dtype": "bfloat16", **DECAYS.get(opt_type, {})}
    tx = make_optimizer(config_of(trainable_parameters_mask="[wo]", adafactor_min_dim_size_to_factor=1, **keys), AXES)
    state = jax.eval_shape(tx.init, tree(0))
    kept = [name for name in names(state) if not name.endswith("count")]
    assert kept
    assert all(name.endswith("mlp/wo/kernel") for name in kept)
    if opt_type != "adam_pax":
        assert "bfloat16" in {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    updates, _ = jax.jit(tx.update)(gradient(0), zeros, tree(0))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates["token_embedder"]))
