"""The largest logit of each head against a plain computation of all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import inputs

from trainer import sharding
from trainer.config.load import load
from trainer.config.rules import make_rules
from trainer.config.schema import schema
from trainer.ops.attention import dot_product_attention
from trainer.ops.max_logits import max_logits

largest = jax.jit(max_logits, static_argnames=("window", "block", "scale"))
SHAPE = (8, 33, 4, 2, 8)  # rows, length, query heads, key heads, width


def plainly(query, key, mask, window):
    """Returns [h], the maximum over all visible pairs outside padding."""
    query, key, position, segment = (np.asarray(x) for x in (query, key, mask.query_position, mask.query_segment))
    logits = np.einsum("bthd,bshd->bhts", query, np.repeat(key, SHAPE[2] // SHAPE[3], axis=2)) / np.sqrt(SHAPE[4])
    distance = position[:, :, None] - position[:, None, :]
    counts = (distance >= 0) & (segment[:, :, None] == segment[:, None, :]) & (segment[:, :, None] != 0)
    counts &= (distance < window) if window else True
    return np.where(counts[:, None], logits, -np.inf).max((0, 2, 3))


def hot(seed):
    """Returns inputs whose largest logits must be ignored: at padding, and between segments."""
    query, key, _, mask = jax.tree.map(np.array, inputs(*SHAPE, seed=seed))
    padding = (mask.query_segment == 0)[..., None, None]
    last = (mask.query_segment == 3)[..., None, None]
    first = (mask.query_segment == 1)[..., None, None]
    query, key = (np.where(padding, np.float32(50), x) for x in (query, key))
    query[..., 0] = np.where(last[..., 0], 50, query[..., 0])
    key[..., 0] += np.where(first[..., 0], 50, 0)
    return query, key, mask


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("block", [4, 7, 512])
def test_it_is_the_largest_of_the_logits_that_count(block, window):
    query, key, mask = hot(seed=block)
    found = largest(query, key, mask, window=window, block=block)
    expected = plainly(query, key, mask, window)
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # sums of 8 products in another order
    assert len(set(np.round(expected, 3))) == SHAPE[2]


def test_its_scale_is_that_of_the_op():
    query, key, mask = hot(seed=0)
    ratio = np.asarray(largest(query, key, mask, scale=0.5)) / np.asarray(largest(query, key, mask))
    np.testing.assert_allclose(ratio, 0.5 * np.sqrt(SHAPE[4]), rtol=1e-6)


def test_of_padding_alone_it_is_finite():
    query, key, mask = hot(seed=0)
    nothing = mask._replace(query_segment=0 * mask.query_segment, key_segment=0 * mask.key_segment)
    found = np.asarray(largest(query, key, nothing))
    assert (found < -1e37).all()
    assert np.isfinite(found).all()


@pytest.mark.parametrize("block", [8, 512])
def test_where_it_is_not_asked_for_it_is_finite_and_below_any_logit(block):
    query, key, mask = hot(seed=0)
    found = np.asarray(largest(query, key, mask, block=block, when=np.asarray(False)))
    assert np.isfinite(found).all()
    assert (found < -1e37).all()


@pytest.mark.parametrize("block", [8, 512])
def test_over_devices_it_is_the_same_and_they_exchange_only_the_maxima(block):
    query, key, mask = hot(seed=1)
    expected = plainly(query, key, mask, 0)
    sizes = {"dataset_type": "synthetic", "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}
    mesh = sharding.get_mesh_from_config(load([f"{key}={value}" for key, value in sizes.items()]).config)

    def sharded(query, key, mask):
        query = sharding.constrain(query, ("activation_batch", "activation_q_length", "activation_heads", None))
        key = sharding.constrain(key, ("activation_batch", "activation_kv_length", "activation_kv_heads", None))
        mask = jax.tree.map(lambda x: sharding.constrain(x, ("activation_batch", "activation_q_length")), mask)
        return max_logits(query, key, mask, block=block)

    rules = make_rules(schema().keys["logical_axis_rules"].default)
    with sharding.on_mesh(mesh, rules):
        compiled = jax.jit(sharded).lower(query, key, mask).compile()
    np.testing.assert_allclose(compiled(query, key, mask), expected, rtol=1e-5)
    text = compiled.as_text()
    assert text.count(" all-reduce(") == 1
    assert not [
        name for name in ("all-gather(", "all-to-all(", "collective-permute(") if name in text.split("ENTRY")[0]
    ]

    # Shards the queries along the row, which needs more communication.
    query, key, mask = (jax.tree.map(lambda x: x[:, 1:], part) for part in (query, key, mask))
    heads = dict.fromkeys(("activation_heads", "activation_kv_heads"), ())
    with sharding.on_mesh(mesh, {**rules, **heads, "activation_q_length": ("tensor",)}):
        found = jax.jit(sharded)(query, key, mask)
    np.testing.assert_allclose(found, largest(query, key, mask), rtol=1e-5)


def test_with_one_tile_the_product_is_that_of_the_reference_op():
    query, key, mask = hot(seed=3)

    def both(query, key, mask):
        return dot_product_attention(query, key, key, mask), max_logits(query, key, mask)

    def products(fn):
        return jax.jit(fn).lower(query, key, mask).compile().as_text().count(" dot(")

    assert products(both) == products(lambda *args: both(*args)[0]) == 2


@pytest.mark.parametrize("when", [None, True])
def test_in_a_scan_over_layers_the_masks_of_all_tiles_are_not_kept(when):
    query, key, mask = hot(seed=4)
    when = when if when is None else jnp.asarray(when)

    def loss(query, weights):
        def layer(x, weight):
            x = x * weight
            return x, max_logits(x, key, mask, block=8, when=when)

        x, largest = jax.lax.scan(layer, query, weights)
        return x.sum(), largest

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=1, has_aux=True))(query, jnp.ones(3))
    # One in the forward and one in the backward pass.
    assert [eqn.primitive.name for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "cond")] == ["scan", "scan"]


def test_nothing_is_differentiated():
    query, key, mask = hot(seed=2)
    for block in (8, 512):
        total = lambda q, k, block=block: max_logits(q, k, mask, block=block).sum()  # noqa: E731
        grads = jax.jit(jax.grad(total, argnums=(0, 1)))(query, key)
        assert not any(np.any(grad) for grad in grads)
