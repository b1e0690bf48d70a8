"""Losses of single tokens."""

import jax
import jax.numpy as jnp


def cross_entropy(logits_btv: jax.Array, target_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of each target in nats, and the log of the softmax's normalizer Z: float32 [b, t]."""
    logits = logits_btv.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    target_logit = jnp.take_along_axis(logits, target_bt[..., None], axis=-1)[..., 0]
    return log_z - target_logit, log_z
