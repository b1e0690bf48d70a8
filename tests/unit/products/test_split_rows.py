"""Products where devices share rows (docs/decisions/0004): tokens stay on their devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.aot.cost import analyze
from trainer.layers.dense import Dense
from trainer.products.context import Context
from trainer.sharding import Axes, on_mesh

RULES = {
    "activation_batch": ("data",),
    "activation_length": ("context",),
    "activation_mlp": (),
    "embed": (),
    "mlp": (),
}
B, T, E, M = 4, 16, 8, 12


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_moves_no_tokens(dtype):
    """The backward pass all-reduces the kernel gradient over the devices, and nothing else."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    graph, params = nnx.split(
        Dense([E], [M], ("embed", "mlp"), dtype=jnp.dtype(dtype), weight_dtype=jnp.float32, rngs=nnx.Rngs(0))
    )
    ids = jnp.zeros((B, T), int)
    context = Context(ids, ids, jnp.zeros(B, int), None)

    def out(params, x):
        return nnx.merge(graph, params)(x, Axes(("activation_batch", "activation_length", "activation_mlp")), context)

    def found(fn):
        at = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data", "context"))
        x = jax.ShapeDtypeStruct((B, T, E), dtype)
        with on_mesh(mesh, RULES):
            compiled = jax.jit(fn, in_shardings=at).lower(params, x).compile()
        return analyze(compiled.as_text(), mesh).collectives

    assert not found(out)
    pulled = found(
        lambda params, x: jax.grad(lambda *xs: out(*xs).astype(jnp.float32).sum(), argnums=(0, 1))(params, x)
    )
    assert {it.kind for it in pulled} == {"all-reduce"}
    assert {(it.size, it.axes) for it in pulled} <= {
        (E * M * 4, axes) for axes in (("data",), ("context",), ("data", "context"))
    }
