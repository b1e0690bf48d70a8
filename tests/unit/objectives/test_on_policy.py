"""The estimate of the reverse KL divergence from sampled tokens."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.objectives.base import Frozen
from trainer.objectives.distillation import PARAMS, REST, Distillation, Schedule, Teacher
from trainer.objectives.on_policy import LABELLED, OLD, OnPolicy
from trainer.ops.divergence import reverse_kl

TOKENS, T = 5, 1.7  # the teacher's tokens, and the temperature


def apply(logits, rest, *inputs, method=None, **others):
    """A model whose parameters are its logits, whatever the input."""
    if method == "head":
        return (jnp.broadcast_to(logits, (*inputs[0].shape[:2], len(logits))),)
    return inputs[0][..., None], {}, None


def loss_of(kind, vocab, **own):
    model = types.SimpleNamespace(vocab_size=TOKENS)
    teacher = Teacher(model, apply, Frozen(None, None, None), TOKENS, None)
    constant = functools.partial(Schedule, shape="constant", steps=1)
    both = {"alpha": constant(1.0, 1.0), "temperature": constant(T, T)}
    objective = kind(apply, teacher=teacher, divergence=reverse_kl, vocab_size=vocab, **both, **own)

    def loss(logits, teacher_logits, target, old):
        ones = np.ones((1, 1), np.int32)
        batch = {"inputs": ones, "targets": ones * target, "inputs_segmentation": ones, "targets_segmentation": ones}
        batch |= {"inputs_position": 0 * ones, "row": ones[0], OLD: jnp.float32(ones * old), LABELLED: 0 * ones}
        frozen = {PARAMS: teacher_logits, REST: {}}
        batch = objective.prepare(batch)
        sums = objective.sums(logits, {}, batch, None, frozen=frozen)
        evaluated = objective.evaluation(logits, {}, batch, frozen=frozen)
        return sums.minimized["distill_loss"], (sums.measured["divergence"], evaluated.loss.total)

    return loss


def log_softmax(logits):
    x = np.float64(logits) / T
    return x - np.log(np.exp(x).sum())


@pytest.mark.parametrize("vocab", [TOKENS, TOKENS + 2])
def test_the_sampled_form_estimates_reverse_kl_and_its_gradient(vocab):
    """Computes the expectation over all tokens, for two sampling distributions. Tokens that the teacher lacks
    contribute nothing."""
    rng = np.random.default_rng(0)
    student, other, theirs = (np.float32(rng.normal(size=size)) for size in (vocab, vocab, TOKENS))
    gradients = [loss_of(OnPolicy, vocab, sampled=True), loss_of(Distillation, vocab)]
    sampled, exact = (jax.jit(jax.value_and_grad(loss, has_aux=True)) for loss in gradients)
    (expected, (divergence, _)), gradient = exact(student, theirs, 0, 0.0)
    ours, teacher = log_softmax(student[:TOKENS]), log_softmax(theirs)
    np.testing.assert_allclose(divergence, np.sum(np.exp(ours) * (ours - teacher)), rtol=1e-5)
    assert np.abs(gradient).max() > 0.01
    for old in map(log_softmax, (student, other)):
        found = [sampled(student, theirs, y, old[y]) for y in range(vocab)]
        for y, ((loss, (measured, evaluated)), slope) in enumerate(found):
            by_hand = -np.exp(ours[y] - old[y]) * (teacher[y] - ours[y]) if y < TOKENS else 0
            np.testing.assert_allclose(measured, by_hand, rtol=1e-4)
            np.testing.assert_allclose(loss, T**2 * measured, rtol=1e-6)
            of_log_prob = (np.arange(TOKENS) == y) - np.exp(ours)
            np.testing.assert_allclose(slope[:TOKENS], T * by_hand * of_log_prob, rtol=1e-3, atol=1e-6)
            np.testing.assert_allclose(evaluated, divergence, rtol=1e-6)
        mean = sum(np.exp(old[y]) * np.float64(loss) for y, ((loss, _), _) in enumerate(found))
        slope = sum(np.exp(old[y]) * np.float64(grad) for y, (_, grad) in enumerate(found))
        np.testing.assert_allclose(mean, expected, rtol=1e-5)
        np.testing.assert_allclose(slope, gradient, atol=1e-6)
