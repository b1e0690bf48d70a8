"""AdamW as in Praxis: instead of bias correction, the decay rates of the moments depend on the update's number."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainer.optim.keys import Given


def adam_pax(keys: Any, given: Given) -> optax.GradientTransformation:
    """Returns Adam with decoupled weight decay. Its moments are unbiased averages of all gradients so far.

    In update t, counted from 1, a moment's decay rate is b (1 - b^(t-1)) / (1 - b^t), where b is `adam_b1` or `adam_b2`
    (Shazeer and Stern 2018, arXiv:1804.04235, section 7.1). The updates equal those of AdamW up to rounding. The state
    differs: its moments need no bias correction. Both moments are float32.
    """
    return optax.chain(
        scale_by_corrected_adam(keys.adam_b1, keys.adam_b2, keys.adam_eps, keys.adam_eps_root),
        optax.add_decayed_weights(keys.adam_weight_decay, given.decayed),
        optax.scale_by_learning_rate(given.schedule),
    )


def scale_by_corrected_adam(b1: float, b2: float, eps: float, eps_root: float) -> optax.GradientTransformation:
    """Returns the transformation of gradients to mu / (sqrt(nu + eps_root) + eps), with the moments mu and nu of
    `adam_pax`."""

    def init(params: Any) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(
            jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        )

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(grads, state.mu, _corrected(b1, count), 1)
        nu = optax.tree.update_moment(grads, state.nu, _corrected(b2, count), 2)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + eps_root) + eps), mu, nu)
        kept = (optax.tree.cast_like(new, old) for new, old in ((mu, state.mu), (nu, state.nu)))
        return updates, optax.ScaleByAdamState(count, *kept)

    return optax.GradientTransformation(init, update)


def _corrected(decay: float, count: jax.Array) -> jax.Array:
    """Returns the decay rate of a moment in update `count`, float32 []."""
    t = count.astype(jnp.float32)
    return decay * (1 - decay ** (t - 1)) / (1 - decay**t)
