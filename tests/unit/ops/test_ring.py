"""Ring attention: gradients, skipped tiles, and blocks that do not divide the row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_close, inputs, value_and_grads
from jax.sharding import Mesh, PartitionSpec

from trainer.ops.attention import Mask, dot_product_attention, visible
from trainer.ops.ring import Ring, ring_attention

N = 4


def in_ring(query, key, value, mask, *, block=512, **how):
    """Runs `ring_attention` on a ring of four devices."""
    return _compiled(Ring(("context",), block=block, **how))(query, key, value, mask)


@functools.cache
def _compiled(ring):
    tokens, mesh = PartitionSpec(None, "context"), Mesh(np.array(jax.devices()[:N]), ("context",))
    run = functools.partial(ring_attention, ring=ring)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(tokens,) * 4, out_specs=tokens))


def test_blocks_need_not_divide_the_tokens():
    args = inputs(2, 32, 4, 2, 8)
    expected = value_and_grads(dot_product_attention, args, window=9, soft_cap=1.5)
    found = value_and_grads(functools.partial(in_ring, block=3, soft_cap=1.5), args, window=9)
    assert_close(found, expected, 1e-5)


def test_tiles_that_no_query_sees_are_not_computed():
    """NaN values reveal which tiles are computed, because even a zero weight turns them into a NaN result."""
    block, length, window = 4, 32, 8
    query, key, value, mask = inputs(1, length, 2, 1, 8)
    seen = np.asarray(visible(mask, window))[0].reshape(length // block, block, length // block, block).any((1, 3))
    assert 0 < seen.sum() < seen.size / 2 + len(seen)
    for j in range(length // block):
        poisoned = np.array(value)
        poisoned[:, j * block : (j + 1) * block] = np.nan
        out = in_ring(query, key, poisoned, mask, block=block, window=window)
        finite = np.isfinite(np.asarray(out)).all((0, 2, 3)).reshape(-1, block).any(1)
        np.testing.assert_array_equal(finite, ~seen[:, j])


def test_a_query_that_sees_nothing_has_no_result():
    query, key, value, mask = inputs(1, 16, 2, 1, 8)
    apart = Mask(mask.query_position, mask.key_position, mask.query_segment, mask.key_segment + 100)
    sums = jax.jit(jax.value_and_grad(lambda *xs: in_ring(*xs, apart).sum(), argnums=(0, 1, 2)))
    out, grads = sums(query, key, value)
    assert out == 0
    assert all((np.asarray(grad) == 0).all() for grad in grads)


def test_a_loop_over_layers_keeps_no_tile():
    """No array that depends only on the mask is computed for all tiles before the loop."""
    block, length = 4, 64
    *arrays, mask = inputs(1, length, 2, 1, 4)

    def loss(query, key, value):
        def layer(x, scale):
            return x + ring_attention(x * scale, key, value, mask, ring=Ring(block=block)), None

        return jax.lax.scan(layer, query, jnp.ones(3))[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(*arrays)
    largest = max(x.aval.size for equation in jaxpr.eqns for x in equation.outvars)
    assert largest < length**2


def test_sums_of_gradients_over_tiles_are_float32():
    """With bfloat16 inputs, the gradients of many tiles must be as accurate as those of one tile."""
    args = inputs(1, 128, 2, 1, 8, dtype=jnp.bfloat16)
    exact = value_and_grads(dot_product_attention, (*(np.asarray(x).astype(np.float32) for x in args[:3]), args[3]))
    tiles, whole = (value_and_grads(functools.partial(in_ring, block=block), args) for block in (2, 512))
    for name in ("query", "key", "value"):
        errors = [np.square(found[name] - exact[name]).mean() for found in (tiles, whole)]
        assert errors[0] < 1.3 * errors[1], name


@pytest.mark.parametrize(("saved", "products"), [(("context",), 2 + 5), ((), 2 + 2 + 5)])
def test_a_policy_that_saves_context_does_not_run_it_again(saved, products):
    """Attention needs two products forward and five backward."""
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    run = jax.checkpoint(functools.partial(ring_attention, ring=Ring(block=8)), policy=policy)
    loss = jax.grad(lambda *args: jnp.square(run(*args)).sum(), argnums=(0, 1, 2))
    assert jax.jit(loss).lower(*inputs(1, 16, 2, 1, 4)).as_text().count("stablehlo.dot_general") == products
