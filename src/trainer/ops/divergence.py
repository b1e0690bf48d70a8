"""Divergences between the distributions of two models over the same tokens. v: the size of the vocabulary.

KL(p || q) is computed as the sum of p log(p / q) - p + q over the vocabulary. The terms - p + q sum to 0, but without
them rounding would give equal distributions a nonzero gradient.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Arguments: the logits of the student and of the teacher [..., v]. Result: nats, float32 [...].
Divergence = Callable[[jax.Array, jax.Array], jax.Array]
_ABSENT = -1e30  # the logit of a token that is excluded


def forward_kl(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Returns KL(teacher || student): the student learns to cover everything that the teacher may write."""
    return _kl(_log_softmax(teacher), _log_softmax(student))


def reverse_kl(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Returns KL(student || teacher): the student learns to write only what the teacher finds likely."""
    return _kl(_log_softmax(student), _log_softmax(teacher))


def jensen_shannon(weight: float, student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Returns weight KL(teacher || m) + (1 - weight) KL(student || m), where m = weight teacher + (1 - weight) student.

    This is the generalized Jensen-Shannon divergence of Agarwal et al. 2024 (arXiv:2306.13649). `weight`: in (0, 1).
    """
    ours, theirs = _log_softmax(student), _log_softmax(teacher)
    mixture = jnp.logaddexp(theirs + math.log(weight), ours + math.log1p(-weight))
    return weight * _kl(theirs, mixture) + (1 - weight) * _kl(ours, mixture)


def divergence_of(name: str, weight: float) -> Divergence:
    """Returns the divergence that distill_loss=`name` selects. `weight`: see `jensen_shannon`."""
    named = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "sampled_reverse_kl": reverse_kl}
    return named.get(name) or functools.partial(jensen_shannon, weight)


def first_tokens(count: int, *logits: jax.Array) -> list[jax.Array]:
    """Truncates the logits of several models to the smallest vocabulary, and masks all but the first `count` tokens."""
    size = min(x.shape[-1] for x in logits)
    cut = [x if x.shape[-1] == size else x[..., :size] for x in logits]
    return cut if count >= size else [jnp.where(jnp.arange(size) < count, x, _ABSENT) for x in cut]


def with_others(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the logits of `tokens` [..., k], followed by one logit for all other tokens together: [..., k + 1].
    `logits`: [..., v]."""
    chosen = jnp.take_along_axis(logits, tokens, axis=-1)
    others = jnp.put_along_axis(logits, tokens, _ABSENT, axis=-1, inplace=False)
    return jnp.concatenate([chosen, jax.nn.logsumexp(others, axis=-1, keepdims=True)], axis=-1)


def _kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    return jnp.sum(p * (log_p - log_q) - p + q, axis=-1)


def _log_softmax(logits: jax.Array) -> jax.Array:
    # Logits of -inf would make a term 0 x inf, which is NaN.
    return jax.nn.log_softmax(jnp.maximum(logits.astype(jnp.float32), _ABSENT), axis=-1)
