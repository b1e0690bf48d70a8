"""Random keys. One generator for everything: dropout draws a mask per row under vmap, where others go wrong."""

import jax

# Streams of one seed. Initial parameters fold small numbers into the seed's own key.
DROPOUT, SAMPLING = 2**31 - 1, 2**31 - 2


def seed_key(seed: int, stream: int | None = None) -> jax.Array:
    """The Threefry key of `seed` (0 to 2**32 - 1), or of one of its streams, whatever JAX's default generator is."""
    key = jax.random.key(seed, impl="threefry2x32")
    return key if stream is None else jax.random.fold_in(key, stream)
