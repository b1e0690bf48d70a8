"""The reference op against nested loops in float64."""

import numpy as np
import pytest
from attention_cases import inputs

from trainer.ops.attention import dot_product_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def packed():
    return inputs(2, 24, HEADS, KV_HEADS, WIDTH)


def loops(query, key, value, mask, window, soft_cap, sinks=None):
    """Computes attention by nested loops in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    mask = type(mask)(*map(np.asarray, mask))
    out = np.zeros(query.shape)
    for b, t, h in np.ndindex(query.shape[:3]):
        seen = [
            s
            for s in range(key.shape[1])
            if 0 <= mask.query_position[b, t] - mask.key_position[b, s] < (window or np.inf)
            and mask.key_segment[b, s] == mask.query_segment[b, t]
        ]
        k = h // (HEADS // KV_HEADS)
        score = np.array([query[b, t, h] @ key[b, s, k] for s in seen]) / WIDTH**0.5
        if soft_cap:
            score = soft_cap * np.tanh(score / soft_cap)
        weight, sink = np.exp(score), 0 if sinks is None else np.exp(sinks[h])
        out[b, t, h] = (weight / (weight.sum() + sink)) @ value[b, seen, k]
    return out


@pytest.mark.parametrize(
    ("window", "soft_cap", "sinks"),
    [(0, 0.0, None), (3, 0.0, None), (1, 0.0, None), (0, 0.5, None), (4, 2.0, np.float32([-1, 0, 0.5, 2]))],
)
def test_reference_op_equals_loops(window, soft_cap, sinks):
    args = packed()
    actual = dot_product_attention(*args, window=window, soft_cap=soft_cap, sinks=sinks)
    np.testing.assert_allclose(actual, loops(*args, window, soft_cap, sinks), atol=2e-6)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_query_in_chunks_sees_the_keys_of_its_own_chunk(size):
    query, key, value, mask = packed()
    chunk = [np.asarray(x) // size for x in (mask.query_position, mask.key_position)]
    one = mask._replace(query_segment=mask.query_segment + 10 * chunk[0], key_segment=mask.key_segment + 10 * chunk[1])
    expected = loops(query, key, value, one, 0, 0.0)
    in_chunks = mask.in_chunks(size)
    real = np.asarray(mask.query_segment != 0)
    np.testing.assert_array_equal(in_chunks.query_segment != 0, real)
    actual = dot_product_attention(query, key, value, in_chunks, window=size)
    np.testing.assert_allclose(actual[real], expected[real], atol=2e-6)


def test_segments_do_not_see_each_other():
    query, key, value, mask = packed()
    first = np.asarray(mask.key_segment) == 1
    other = np.where(first[..., None, None], value, value + 1)
    before, after = (dot_product_attention(query, key, v, mask) for v in (value, other))
    np.testing.assert_array_equal(np.asarray(before)[first], np.asarray(after)[first])
    assert not np.array_equal(before, after)
