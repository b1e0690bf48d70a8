"""Divergences against float64 and finite differences, and their values for equal distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.ops.divergence import divergence_of, first_tokens

WEIGHT = 0.3
NAMES = ("forward_kl", "reverse_kl", "jensen_shannon")


def logits(seed, size=11):
    return (3 * np.random.default_rng(seed).normal(size=(2, 5, size))).astype(np.float32)


def expected(name, student, teacher):
    """Returns the divergence in float64, by its definition."""

    def softmax(x):
        powers = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)

    def kl(p, q):
        return np.sum(p * np.log(p / q), -1)

    ours, theirs = softmax(student), softmax(teacher)
    mixture = WEIGHT * theirs + (1 - WEIGHT) * ours
    js = WEIGHT * kl(theirs, mixture) + (1 - WEIGHT) * kl(ours, mixture)
    return {"forward_kl": kl(theirs, ours), "reverse_kl": kl(ours, theirs), "jensen_shannon": js}[name]


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name):
    student, teacher = logits(0), logits(1)
    total = jax.jit(jax.value_and_grad(lambda x: jnp.sum(divergence_of(name, WEIGHT)(x, jnp.asarray(teacher)))))
    found, grad = total(student)
    assert found == pytest.approx(expected(name, student, teacher).sum(), rel=1e-6)
    direction = np.random.default_rng(2).normal(size=student.shape)
    ahead, behind = (expected(name, student + step * direction, teacher).sum() for step in (1e-5, -1e-5))
    assert np.sum(grad * direction) == pytest.approx((ahead - behind) / 2e-5, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_equal_logits_have_no_divergence(name):
    both = logits(0, 300)
    value, grad = jax.jit(jax.value_and_grad(lambda x, y: jnp.sum(divergence_of(name, WEIGHT)(x, y))))(both, both)
    if name == "jensen_shannon":
        assert abs(value) / both[..., 0].size < 1e-6
        assert np.abs(grad).max() < 1e-6
    else:
        assert value == 0
        assert not np.any(grad)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_first_tokens_are_compared(name):
    student, teacher = logits(0, 11), logits(1, 13)

    def compared(x, count):
        return divergence_of(name, WEIGHT)(*first_tokens(count, x, jnp.asarray(teacher)))

    for count in (7, 11):
        found = compared(jnp.asarray(student), count)
        np.testing.assert_allclose(found, expected(name, student[..., :count], teacher[..., :count]), rtol=1e-5)
        grad = np.asarray(jax.grad(lambda x: jnp.sum(compared(x, count)))(jnp.asarray(student)))  # noqa: B023
        assert np.all(grad[..., count:] == 0)
        assert np.any(grad[..., :count])
