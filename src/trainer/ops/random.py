"""Random keys. Always Threefry, because other generators do not draw each row from its own key under vmap."""

import jax

# Separate streams of one seed. Parameter initialization folds small numbers into the seed's own key.
DROPOUT, SAMPLING = 2**31 - 1, 2**31 - 2


def seed_key(seed: int, stream: int | None = None) -> jax.Array:
    """Returns the Threefry key of `seed` (0 to 2**32 - 1), or of one of its streams. Independent of JAX's default
    generator."""
    key = jax.random.key(seed, impl="threefry2x32")
    return key if stream is None else jax.random.fold_in(key, stream)
