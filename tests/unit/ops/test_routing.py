"""Sigmoid scores, their groups and their bias, against a token-by-token reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.ops.routing import by_sigmoid, entropy, load_balance

EXPERTS, CHOSEN = 12, 3
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(5, 7, EXPERTS)).astype(np.float32)
BIAS = RNG.normal(scale=0.3, size=EXPERTS).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def reference(logits, bias, groups, kept, normalize):
    """The experts and weights of one token."""
    score = sigmoid(logits)
    biased, size = score + bias, EXPERTS // groups

    def of_group(g):
        return sum(sorted(biased[g * size : (g + 1) * size])[-2:])

    best = sorted(range(groups), key=lambda g: (-of_group(g), g))[:kept]
    among = [e for e in range(EXPERTS) if e // size in best]
    expert = sorted(among, key=lambda e: (-biased[e], e))[:CHOSEN]
    weight = score[expert]
    return expert, weight / weight.sum() if normalize else weight


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (3, 1)])
def test_experts_are_chosen_with_the_bias_and_weighted_without(groups, kept, normalize):
    route = functools.partial(by_sigmoid, groups=groups, kept=kept, normalize=normalize)
    found = jax.jit(route, static_argnums=1)(LOGITS, CHOSEN, BIAS)
    for at in np.ndindex(*LOGITS.shape[:2]):
        expert, weight = reference(LOGITS[at], BIAS, groups, kept, normalize)
        assert list(np.asarray(found.expert[at])) == expert
        np.testing.assert_allclose(found.weight[at], weight, rtol=1e-5)


def test_ties_go_to_the_first_experts_and_the_first_group():
    found = by_sigmoid(jnp.zeros((1, EXPERTS)), CHOSEN, None, normalize=True, groups=4, kept=2)
    assert found.expert.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(found.weight, 1 / 3, rtol=1e-6)


def test_a_bias_gets_no_gradient_and_negative_scores_stay_within_their_groups():
    def total(logits, bias):
        return (by_sigmoid(logits, CHOSEN, bias, normalize=False, groups=4, kept=1).weight ** 2).sum()

    by_logits, by_bias = jax.grad(total, (0, 1))(LOGITS, BIAS)
    assert by_logits.any()
    assert not by_bias.any()
    low = by_sigmoid(LOGITS, CHOSEN, jnp.full(EXPERTS, -9.0), normalize=False, groups=4, kept=1).expert
    assert (low // 3 == low[..., :1] // 3).all()


def test_statistics_of_sigmoid_scores_are_of_their_shares():
    share = sigmoid(LOGITS) / sigmoid(LOGITS).sum(-1, keepdims=True)
    expert = by_sigmoid(LOGITS, CHOSEN, None, normalize=True).expert
    real = np.ones(LOGITS.shape[:2], bool)
    logs = jax.nn.log_sigmoid(LOGITS)
    np.testing.assert_allclose(entropy(logs, real), -(share * np.log(share)).sum((1, 2)), rtol=1e-5)
    for row, found in enumerate(load_balance(logs, expert, real)):
        count = np.bincount(np.asarray(expert[row]).ravel(), minlength=EXPERTS)
        np.testing.assert_allclose(found, EXPERTS * (count / 7 * share[row].mean(0)).sum(), rtol=1e-5)
