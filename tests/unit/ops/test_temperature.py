"""The query factor that grows with position, in both published forms."""

import jax.numpy as jnp
import numpy as np

from trainer.ops.temperature import Temperature


def test_the_factor_is_that_of_llama_4_and_of_ministral_3():
    position = np.array([0, 2, 3, 4, 8191, 8192, 1_000_000])
    exact = position.astype(np.float64)
    llama = 1 + 0.1 * np.log1p(np.floor((exact + 1) / 4))
    np.testing.assert_allclose(Temperature(0.1, 4, first=1).factor(position), llama, rtol=2e-7)
    ministral = 1 + 0.3 * np.log(1 + np.floor(exact / 8192))
    np.testing.assert_allclose(Temperature(0.3, 8192).factor(position), ministral, rtol=2e-7)


def test_queries_keep_their_dtype_and_those_before_the_first_step_their_bits():
    query = np.random.default_rng(0).normal(size=(1, 6, 2, 4))
    tempered = Temperature(0.5, 3).tempered(jnp.asarray(query, jnp.bfloat16), np.arange(6)[None])
    assert tempered.dtype == jnp.bfloat16
    np.testing.assert_array_equal(tempered[:, :3], jnp.asarray(query[:, :3], jnp.bfloat16))
    np.testing.assert_allclose(tempered[:, 3:].astype(np.float32), query[:, 3:] * (1 + 0.5 * np.log(2)), rtol=0.01)
