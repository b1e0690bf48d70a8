"""Products on a mesh of data, fsdp and tensor, which XLA gets wrong without `for_product` (docs/decisions/0021)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import random_variables, tiny_config

from trainer.backends.registry import make_model
from trainer.models.families import axis_rules
from trainer.ops.paths import by_name
from trainer.sharding import make_mesh, named_sharding, on_mesh

AXES = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
ROWS, LENGTH, WIDTH = 8, 4, 64  # 8 tokens per shard of the rows, fewer than the 32 columns per shard of a matrix


@functools.cache
def loss_and_gradients(tied, devices):
    axes = AXES if devices > 1 else {}
    sizes = {"base_emb_dim": WIDTH, "max_target_length": LENGTH, "logits_via_embedding": tied}
    config = tiny_config("nnx", devices=devices, per_device_batch_size=ROWS / devices, **sizes, **axes)
    model, mesh, rules = make_model(config), make_mesh(config, jax.devices()[:devices]), axis_rules(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, LENGTH))
    positions = np.broadcast_to(np.arange(LENGTH), tokens.shape)

    def loss(params, tokens):
        with on_mesh(mesh, rules):
            hidden = model.apply(params, {}, tokens, positions, jnp.ones_like(positions), jnp.arange(ROWS))[0]
            logits = model.apply(params, {}, hidden, method="head")[0]
        return -jax.nn.log_softmax(logits)[..., 5].mean()

    params = jax.tree.map(
        lambda leaf, names: jax.device_put(leaf, named_sharding(mesh, names, leaf.shape, rules)),
        random_variables(model)[0],
        model.param_axes,
    )
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    return by_name(jax.device_get(jax.jit(jax.value_and_grad(loss))(params, jax.device_put(tokens, rows))))


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_of_few_tokens_are_those_of_one_device(tied):
    one, eight = loss_and_gradients(tied, 1), loss_and_gradients(tied, 8)
    for name, expected in one.items():
        # float32 sums are added in another order.
        np.testing.assert_allclose(eight[name], expected, atol=1e-5 * np.abs(expected).max(), err_msg=name)


def test_the_compiler_still_needs_it():
    """Fails once JAX multiplies correctly by itself; then remove `for_product`."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    at = [NamedSharding(mesh, PartitionSpec(*it)) for it in ((("data", "fsdp"), "tensor"), ("tensor", "fsdp"))]
    x, w = (np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32) for i in range(2))
    product = jax.jit(jnp.matmul, in_shardings=at, out_shardings=at[0])(x, w)
    assert np.abs(product - x @ w).max() > 1
