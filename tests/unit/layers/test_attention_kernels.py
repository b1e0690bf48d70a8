"""The attention layer with per-device kernels, on a mesh and without one, against the reference op."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_close, inputs
from flax import nnx
from support import drawn

from trainer import sharding
from trainer.config.load import load
from trainer.config.rules import make_rules
from trainer.config.schema import schema
from trainer.layers import attention
from trainer.ops.cudnn import cudnn_attention
from trainer.ops.rope import Rope
from trainer.ops.splash import splash_attention
from trainer.products.context import Context

# The same kernels, run on this CPU.
HERE = {
    "splash": functools.partial(splash_attention, interpret=True),
    "cudnn_flash_jax": functools.partial(cudnn_attention, implementation="xla"),
}


def results(op, dtype, mask, **how):
    """Returns the output, and the gradients of its weighted sum with respect to each parameter and the input."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "rope": Rope(1, 10000), "window": 50}
    dtypes = {"dtype": jnp.dtype(dtype), "weight_dtype": jnp.dtype("float32")}
    layer = drawn(lambda: attention.Attention(24, op=op, **sizes, **how, **dtypes, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 4, 128, 24)).astype(np.float32)
    weight *= (np.asarray(mask.query_segment) > 0)[..., None]
    graphdef, params = nnx.split(layer)

    def loss(params, x):
        layer = nnx.merge(graphdef, params)
        out, cache = layer(x.astype(dtype), None, Context(mask.query_position, mask.query_segment, jnp.arange(4), None))
        assert cache is None
        return jnp.sum(out.astype(jnp.float32) * weight), out * (weight != 0)

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    leaves = jax.tree_util.tree_leaves_with_path({"out": out, "grads": grads})
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float32) for path, leaf in leaves}


@pytest.mark.parametrize(
    ("op", "dtype", "tolerance", "on_a_mesh", "chunked"),
    [("splash", "float32", 1e-4, True, True), ("cudnn_flash_jax", "bfloat16", 0.05, False, False)],
)
def test_a_kernel_in_the_layer_equals_the_reference_op(op, dtype, tolerance, on_a_mesh, chunked, monkeypatch):
    mask = inputs(4, 128, 1, 1, 8)[3]
    run = functools.partial(results, mask=mask, chunked=chunked)
    expected = run("dot_product", dtype)
    parts = []

    def spied(query, key, value, mask, dropout=None, **how):
        parts.append((query.shape, key.shape, mask.query_segment.shape))
        return HERE[op](query, key, value, mask, dropout, **how)

    monkeypatch.setitem(attention.OPS, op, spied)
    if on_a_mesh:
        sizes = {"dataset_type": "synthetic", "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}
        mesh = sharding.get_mesh_from_config(load([f"{key}={value}" for key, value in sizes.items()]).config)
        with sharding.on_mesh(mesh, make_rules(schema().keys["logical_axis_rules"].default)):
            actual = run(op, dtype)
        assert set(parts) == {((1, 128, 2, 64), (1, 128, 1, 64), (1, 128))}
    else:
        actual = run(op, dtype)
        assert set(parts) == {((4, 128, 4, 64), (4, 128, 2, 64), (4, 128))}
    assert_close(actual, expected, tolerance)
