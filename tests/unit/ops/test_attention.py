import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.ops.attention import Dropout, Mask, blockwise_attention, dot_product_attention

ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 24, 4, 2, 8


def inputs(seed=0, length=LENGTH):
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(ROWS, length, HEADS, WIDTH)).astype(np.float32)
    key, value = rng.normal(size=(2, ROWS, length, KV_HEADS, WIDTH)).astype(np.float32)
    segment = np.sort(rng.integers(1, 4, (ROWS, length)), axis=1)
    position = np.tile(np.arange(length), (ROWS, 1))
    return query, key, value, Mask(*map(jnp.asarray, (position, position, segment, segment)))


def loops(query, key, value, mask):
    """Attention as four nested loops in float64."""
    out = np.zeros(query.shape)
    for b, t, h in np.ndindex(query.shape[:3]):
        seen = [
            s
            for s in range(key.shape[1])
            if mask.key_position[b, s] <= mask.query_position[b, t]
            and mask.key_segment[b, s] == mask.query_segment[b, t]
        ]
        k = h // (HEADS // KV_HEADS)
        score = np.array([query[b, t, h].astype(float) @ key[b, s, k] for s in seen]) / WIDTH**0.5
        weight = np.exp(score - score.max())
        out[b, t, h] = (weight / weight.sum()) @ value[b, seen, k]
    return out


def test_reference_op_equals_loops():
    args = inputs()
    np.testing.assert_allclose(dot_product_attention(*args), loops(*args), atol=2e-6)


@pytest.mark.parametrize("block", [7, 8, 64])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_blockwise_op_equals_the_reference_op(block, rate):
    query, key, value, mask = inputs()
    dropout = Dropout(jax.random.key(1), jnp.arange(ROWS), rate) if rate else None
    weight = np.random.default_rng(1).normal(size=query.shape)

    def run(op, **kwargs):
        return jax.value_and_grad(lambda *qkv: jnp.sum(op(*qkv, mask, dropout, **kwargs) * weight), argnums=(0, 1, 2))(
            query, key, value
        )

    expected, expected_grads = run(dot_product_attention)
    actual, grads = run(blockwise_attention, block=block)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_segments_do_not_see_each_other():
    query, key, value, mask = inputs()
    first = np.asarray(mask.key_segment) == 1
    other = np.where(first[..., None, None], value, value + 1)
    before, after = (dot_product_attention(query, key, v, mask) for v in (value, other))
    np.testing.assert_array_equal(np.asarray(before)[first], np.asarray(after)[first])
    assert not np.array_equal(before, after)


def test_blockwise_op_never_holds_the_square_of_scores():
    length = 8192
    args = [jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (1, 1, 1)]
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def memory(op):
        grad = jax.grad(lambda q, k, v, mask: jnp.sum(op(q, k, v, mask)), argnums=(0, 1, 2))
        compiled = jax.jit(grad).lower(*args, Mask(ids, ids, ids, ids)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    square = length * length * 4
    assert memory(dot_product_attention) > square
    assert memory(blockwise_attention) < square / 6
