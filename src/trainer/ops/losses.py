"""Losses of single tokens."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def cross_entropy(logits_btv: jax.Array, target_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of each target in nats, and the log of the softmax's normalizer Z: float32 [b, t].

    Computed in float32, of which nothing as large as the logits is held: the backward pass makes the softmax again from
    the logits in their own dtype and log Z, and a target, which lies below v, is picked by comparison, which the
    compiler merges into the sums around it, where a gather would want the float32 logits in memory. Differentiable in
    reverse mode only.
    """
    logits = logits_btv.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    target_logit = jnp.sum(jnp.where(_is_target(logits, target_bt), logits, 0), axis=-1)
    return log_z - target_logit, log_z


def _is_target(logits_btv: jax.Array, target_bt: jax.Array) -> jax.Array:
    return jnp.arange(logits_btv.shape[-1], dtype=target_bt.dtype) == target_bt[..., None]


def _forward(logits_btv, target_bt):
    nll, log_z = cross_entropy(logits_btv, target_bt)
    return (nll, log_z), (logits_btv, target_bt, log_z)


def _backward(kept, cotangents):
    """d nll / d logits = softmax - one-hot, d log Z / d logits = softmax."""
    logits_btv, target_bt, log_z = kept
    nll_bar, log_z_bar = cotangents
    softmax = jnp.exp(logits_btv.astype(jnp.float32) - log_z[..., None])
    at_target = jnp.where(_is_target(logits_btv, target_bt), nll_bar[..., None], 0)
    return (softmax * (nll_bar + log_z_bar)[..., None] - at_target).astype(logits_btv.dtype), None


cross_entropy.defvjp(_forward, _backward)
