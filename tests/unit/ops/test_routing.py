"""Sigmoid scores with groups and bias, against a token-by-token reference."""

import jax
import numpy as np
import pytest

from trainer.ops import routing

by_sigmoid = jax.jit(routing.by_sigmoid, static_argnums=1, static_argnames=("normalize", "groups", "kept"))
EXPERTS, CHOSEN = 12, 3
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(5, 7, EXPERTS)).astype(np.float32)
BIAS = RNG.normal(scale=0.3, size=EXPERTS).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def reference(logits, bias, groups, kept, normalize):
    """Returns the experts and weights of one token."""
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
    found = jax.device_get(by_sigmoid(LOGITS, CHOSEN, BIAS, groups=groups, kept=kept, normalize=normalize))
    for at in np.ndindex(*LOGITS.shape[:2]):
        expert, weight = reference(LOGITS[at], BIAS, groups, kept, normalize)
        assert list(found.expert[at]) == expert
        np.testing.assert_allclose(found.weight[at], weight, rtol=1e-5)


def test_ties_go_to_the_first_experts_and_the_first_group():
    found = by_sigmoid(np.zeros((1, EXPERTS), np.float32), CHOSEN, None, normalize=True, groups=4, kept=2)
    assert found.expert.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(found.weight, 1 / 3, rtol=1e-6)


def test_a_bias_gets_no_gradient_and_negative_scores_stay_within_their_groups():
    def total(logits, bias):
        return (by_sigmoid(logits, CHOSEN, bias, normalize=False, groups=4, kept=1).weight ** 2).sum()

    by_logits, by_bias = map(np.asarray, jax.jit(jax.grad(total, (0, 1)))(LOGITS, BIAS))
    assert by_logits.any()
    assert not by_bias.any()
    far = np.full(EXPERTS, -9, np.float32)
    low = np.asarray(by_sigmoid(LOGITS, CHOSEN, far, normalize=False, groups=4, kept=1).expert)
    assert (low // 3 == low[..., :1] // 3).all()


def test_statistics_of_sigmoid_scores_are_of_their_shares():
    share = sigmoid(LOGITS) / sigmoid(LOGITS).sum(-1, keepdims=True)
    expert = np.asarray(by_sigmoid(LOGITS, CHOSEN, None, normalize=True).expert)
    real = np.ones(LOGITS.shape[:2], bool)
    logs = np.log(sigmoid(LOGITS)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(routing.entropy)(logs, real), -(share * np.log(share)).sum((1, 2)), rtol=1e-5)
    for row, found in enumerate(np.asarray(jax.jit(routing.load_balance)(logs, expert, real))):
        count = np.bincount(expert[row].ravel(), minlength=EXPERTS)
        np.testing.assert_allclose(found, EXPERTS * (count / 7 * share[row].mean(0)).sum(), rtol=1e-5)
