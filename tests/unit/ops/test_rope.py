import jax.numpy as jnp
import numpy as np

from trainer.ops.rope import rope

SCALES = {"min_timescale": 1, "max_timescale": 10000}


def test_equals_rotation_of_complex_numbers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 3, 8)).astype(np.float32)
    position = rng.integers(0, 2000, (2, 6))
    pairs = x[..., :4] + 1j * x[..., 4:]
    angle = position[..., None, None] / 10000.0 ** (np.arange(4) / 4)
    turned = pairs * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rope(jnp.asarray(x), jnp.asarray(position), **SCALES), expected, atol=2e-4)


def test_scores_depend_on_the_distance_only():
    rng = np.random.default_rng(1)
    query, key = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def score(i, j):
        turned = [rope(jnp.asarray(x), jnp.full((1, 1), p), **SCALES) for x, p in ((query, i), (key, j))]
        return float(jnp.sum(turned[0] * turned[1]))

    np.testing.assert_allclose(score(7, 3), score(107, 103), rtol=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_keeps_the_dtype():
    x = jnp.ones((1, 2, 1, 4), jnp.bfloat16)
    assert rope(x, jnp.zeros((1, 2), jnp.int32), **SCALES).dtype == jnp.bfloat16
