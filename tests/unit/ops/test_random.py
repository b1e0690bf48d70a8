"""Random numbers at single indices."""

import jax
import jax.numpy as jnp
import numpy as np

from trainer.ops.random import gumbel_at, seed_key


def test_noise_at_indices_is_that_of_the_whole_vector_in_every_bit():
    index = np.random.default_rng(0).permutation(130_000)[:257]
    for seed in (0, 1, 2**32 - 1):
        whole = jax.random.gumbel(seed_key(seed), (130_000,))
        np.testing.assert_array_equal(jax.jit(gumbel_at)(seed_key(seed), jnp.asarray(index)), whole[index])
