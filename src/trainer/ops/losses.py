"""Per-token losses."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def cross_entropy(logits_btv: jax.Array, target_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of each target in nats, and the log of the softmax's normalizer Z: float32 [b, t].

    Computed in float32 without materializing float32 logits. The backward pass recomputes the softmax from the logits,
    in their own dtype, and log Z. The target (less than v) is selected by comparison, which the compiler fuses into the
    surrounding sums; a gather would need the float32 logits in memory. Supports reverse mode only.
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


def _backward(residuals, grads):
    """d nll / d logits = softmax - one-hot, d log Z / d logits = softmax."""
    logits_btv, target_bt, log_z = residuals
    nll_grad, log_z_grad = grads
    softmax = jnp.exp(logits_btv.astype(jnp.float32) - log_z[..., None])
    at_target = jnp.where(_is_target(logits_btv, target_bt), nll_grad[..., None], 0)
    return (softmax * (nll_grad + log_z_grad)[..., None] - at_target).astype(logits_btv.dtype), None


cross_entropy.defvjp(_forward, _backward)
