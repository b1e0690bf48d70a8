import jax
import jax.numpy as jnp
import numpy as np

from trainer.ops.dropout import attention_keep, dropout

dropped = jax.jit(dropout, static_argnums=3)


def test_rate_and_expectation():
    x = np.ones((8, 64, 64), np.float32)
    out = np.asarray(dropped(x, jax.random.key(0), np.arange(8), 0.25))
    assert set(np.unique(out)) == {0.0, np.float32(1 / 0.75)}
    np.testing.assert_allclose((out == 0).mean(), 0.25, atol=0.01)
    np.testing.assert_allclose(out.mean(), 1, atol=0.01)


def test_a_mask_belongs_to_its_row_whatever_the_batch():
    x, key = np.ones((6, 64), np.float32), jax.random.key(3)
    whole = np.asarray(dropped(x, key, np.arange(6), 0.5))
    part = dropped(x[:3], key, np.array([4, 0, 2]), 0.5)
    np.testing.assert_array_equal(part, whole[[4, 0, 2]])
    assert len({row.tobytes() for row in whole}) == 6


def test_each_position_draws_its_own_mask():
    out = np.asarray(dropped(np.ones((1, 16, 64), np.float32), jax.random.key(0), np.arange(1), 0.5))
    assert len({position.tobytes() for position in out[0]}) == 16


def test_without_a_key_or_a_rate_nothing_happens():
    x = jnp.arange(6.0).reshape(2, 3)
    assert dropout(x, None, jnp.arange(2), 0.5) is x
    assert dropout(x, jax.random.key(0), jnp.arange(2), 0.0) is x


def test_attention_mask_of_a_query_does_not_depend_on_the_block():
    keep = jax.jit(lambda key, query: attention_keep(key, np.arange(2), query, heads=3, keys=8, rate=0.5))
    whole, block = (np.asarray(keep(jax.random.key(0), np.arange(*of))) for of in ((8,), (4, 8)))
    assert whole.shape == (2, 3, 8, 8)
    np.testing.assert_array_equal(whole[:, :, 4:], block)
