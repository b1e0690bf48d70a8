"""Queries and keys have separate logical length axes, which can be sharded independently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from trainer.layers.attention import Attention
from trainer.ops.rope import Rope
from trainer.products.context import Context
from trainer.sharding import on_mesh

B, T, E = 2, 16, 8
RULES = {
    **dict.fromkeys(("activation_batch", "embed"), ("data",)),
    **dict.fromkeys(("activation_length", "activation_norm_length", "activation_embed"), ()),
    **dict.fromkeys(
        ("activation_heads", "activation_kv_heads", "q_heads", "kv_heads", "heads", "kv", "kv_head_dim"), ()
    ),
    **dict.fromkeys(("activation_q_length", "activation_kv_length"), ()),
}


@pytest.mark.parametrize("op", ["dot_product", "blockwise"])
@pytest.mark.parametrize("sharded", ["activation_q_length", "activation_kv_length"])
def test_attention_is_the_same_with_either_length_sharded(op, sharded):
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 4, "rope": Rope(1, 10_000), "op": op}
    dtypes = {"dtype": jnp.float32, "weight_dtype": jnp.float32}
    graph, params = nnx.split(nnx.eval_shape(lambda: Attention(E, **sizes, **dtypes, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), params)
    x = rng.normal(size=(B, T, E)).astype(np.float32)
    position = np.broadcast_to(np.arange(T) % 10, (B, T))
    segment = np.broadcast_to(1 + np.arange(T) // 10, (B, T))

    def loss(params, x):
        return jnp.sum(nnx.merge(graph, params)(x, None, Context(position, segment, np.arange(B), None))[0] ** 2)

    expected = jax.jit(jax.value_and_grad(loss))(params, x)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with on_mesh(mesh, RULES | {sharded: ("tensor",)}):
        program = jax.jit(jax.value_and_grad(loss)).lower(params, x)
        found, text = program.compile()(params, x), program.as_text()
    # With two key-value heads and no rule for heads, only the length axis can have 4 shards.
    assert '{"tensor"}' in text
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)  # summed in another order
