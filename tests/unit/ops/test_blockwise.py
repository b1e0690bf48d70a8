"""The blockwise op: same function and dropout masks as the reference op, with the promised memory and cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_close, inputs, value_and_grads

from trainer.ops.attention import Dropout, Mask, dot_product_attention
from trainer.ops.blockwise import blockwise_attention

SINKS = {"sinks": jnp.array([-1.0, 0.0, 0.5, 2.0])}


@pytest.mark.parametrize(
    ("block", "rate", "window", "keys"),
    [
        (7, 0.5, 0, {"soft_cap": 0.5}),
        (7, 0.5, 6, SINKS),
        (8, 0.0, 16, {"scale": 0.5}),
        (8, 0.0, 17, {"soft_cap": 0.5}),
        (8, 0.0, 40, {}),
        (64, 0.0, 0, SINKS),
        (64, 0.0, 5, {"scale": 0.5}),
    ],
)
def test_blockwise_op_equals_the_reference_op(block, rate, window, keys):
    """Values are narrower than keys, as in multi-head latent attention."""
    args = inputs(2, 24, 4, 2, 12, value_width=8)
    dropout = Dropout(jax.random.key(1), jnp.arange(2), rate) if rate else None
    how = {"dropout": dropout, "window": window, **keys}
    expected = value_and_grads(dot_product_attention, args, **how)
    assert_close(value_and_grads(blockwise_attention, args, **how, block=block), expected, 2e-6)


def test_gradients_of_keys_are_summed_in_float32():
    """A key's gradient is a sum over blocks. A bfloat16 sum would lose precision with each block."""
    exact = value_and_grads(dot_product_attention, inputs(1, 256, 1, 1, 8))["value"]
    args = inputs(1, 256, 1, 1, 8, dtype=jnp.bfloat16)

    def error(op, **how):
        return np.linalg.norm(value_and_grads(op, args, **how)["value"] - exact)

    assert error(blockwise_attention, block=2) < 1.2 * error(dot_product_attention)


def shapes(length):
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    query, key = (jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (2, 1))
    return query, key, key, Mask(ids, ids, ids, ids)


def lowered(op, length, backward, **how):
    def loss(*args):
        return jnp.sum(op(*args, **how))

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)) if backward else loss).lower(*shapes(length))


@pytest.mark.parametrize("window", [0, 256])
def test_blockwise_op_never_holds_the_square_of_scores(window):
    square = 2 * 4096 * 4096 * 4

    def memory(op):
        program = lowered(op, 4096, True, window=window).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert window or memory(dot_product_attention) > square
    assert memory(blockwise_attention) < square / 3


@pytest.mark.parametrize("backward", [False, True])
def test_the_cost_of_a_window_grows_with_the_window_and_not_with_the_length(backward, monkeypatch):
    scan = jax.lax.scan
    # XLA's analysis counts the body of a loop only once.
    monkeypatch.setattr(jax.lax, "scan", lambda body, init, xs: scan(body, init, xs, unroll=len(xs[0])))

    def per_token(length, window):
        """Returns FLOPs of the lowered program and, for gradients, also of the compiled program."""
        programs = [lowered(blockwise_attention, length, backward, window=window, block=32)]
        assert "while" not in programs[0].as_text()
        programs += [programs[0].compile()] if backward else []
        return np.array([x.cost_analysis()["flops"] for x in programs]) / length

    narrow, wide = 33, 97  # a block of 32 queries reads 64 and 128 keys, respectively
    of_narrow = per_token(128, narrow)
    np.testing.assert_allclose(per_token(256, narrow), of_narrow, rtol=1e-3)
    np.testing.assert_allclose(per_token(256, wide), 2 * of_narrow, rtol=0.05)
    np.testing.assert_allclose(per_token(256, 0), 2 * per_token(128, 0), rtol=0.05)
