"""Per-token losses."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(logits_btv: jax.Array, target_bt: jax.Array, mean: bool = False) -> tuple[jax.Array, ...]:
    """Returns each target's negative log-likelihood in nats, and the log of the normalizer Z: float32 [b, t].

    With `mean`, also returns the mean of the negative log-likelihood over the vocabulary, which is the cross entropy
    with a uniform target distribution.

    Computed in float32 without materializing float32 logits. The backward pass recomputes the softmax from log Z and
    the logits in their original dtype. The logits of the targets, which must be less than the vocabulary's size v, are
    selected by comparison, which the compiler fuses into the surrounding sums; a gather would need the float32 logits
    in memory. Differentiable in reverse mode only.
    """
    logits = logits_btv.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    target_logit = jnp.sum(jnp.where(_is_target(logits, target_bt), logits, 0), axis=-1)
    nll = log_z - target_logit
    return (nll, log_z, log_z - jnp.mean(logits, axis=-1)) if mean else (nll, log_z)


def tempered(logits_btv: jax.Array, temperature: float) -> jax.Array:
    """Returns the logits divided by `temperature`, in float32. At temperature 1, returns the logits unchanged."""
    return logits_btv if temperature == 1 else logits_btv.astype(jnp.float32) / temperature


def _is_target(logits_btv: jax.Array, target_bt: jax.Array) -> jax.Array:
    return jnp.arange(logits_btv.shape[-1], dtype=target_bt.dtype) == target_bt[..., None]


def _forward(logits_btv, target_bt, mean):
    # Without the barrier, XLA fuses the matrix product of the output head with the maximum of the logits, and the
    # logits' gradient cannot reuse the logits' buffer. The barrier costs one more read of the logits, except on a CPU,
    # where products are not fused (docs/decisions/0009).
    logits_btv = jax.lax.optimization_barrier(logits_btv)
    losses = cross_entropy(logits_btv, target_bt, mean)
    return losses, (logits_btv, target_bt, losses[1])


def _backward(mean, residuals, grads):
    """d nll / d logits = softmax - one-hot, d log Z / d logits = softmax, d mean nll / d logits = softmax - 1 / v."""
    logits_btv, target_bt, log_z = residuals
    nll_grad, log_z_grad = grads[:2]
    softmax = jnp.exp(logits_btv.astype(jnp.float32) - log_z[..., None])
    at_target = jnp.where(_is_target(logits_btv, target_bt), nll_grad[..., None], 0)
    at_softmax = nll_grad + log_z_grad
    if mean:
        at_target += (grads[2] / logits_btv.shape[-1])[..., None]
        at_softmax += grads[2]
    return (softmax * at_softmax[..., None] - at_target).astype(logits_btv.dtype), None


cross_entropy.defvjp(_forward, _backward)
