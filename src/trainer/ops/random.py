"""Random keys, always for Threefry: under `jax.vmap`, other generators do not draw each row from the row's own key."""

import jax
import jax.numpy as jnp

# Separate streams of one seed. Their numbers are large, because parameter initialization folds small numbers into the
# seed's key.
DROPOUT, SAMPLING, ROUNDING = 2**31 - 1, 2**31 - 2, 2**31 - 3


def seed_key(seed: int | jax.Array, stream: int | None = None) -> jax.Array:
    """Returns the Threefry key of `seed` (0 to 2**32 - 1), or of one of its streams, regardless of JAX's default
    generator."""
    key = jax.random.key(seed, impl="threefry2x32")
    return key if stream is None else jax.random.fold_in(key, stream)


def gumbel_at(key: jax.Array, index_n: jax.Array) -> jax.Array:
    """Returns exactly `jax.random.gumbel(key, (v,), mode="low")[index_n]`, float32 [n], but draws only these entries.

    With jax_threefry_partitionable, which is the default, Threefry's bits at an index are the key folded with the
    index.
    """
    folded = jax.random.key_data(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index_n))
    bits = folded[:, 0] ^ folded[:, 1]
    one = jnp.uint32(0x3F800000)  # the bits of 1.0, whose mantissa is replaced by random bits
    uniform = jax.lax.bitcast_convert_type(bits >> 9 | one, jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))
