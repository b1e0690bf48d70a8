"""PartitionSpecs for the state of any NNX module, from names and shapes alone; see docs/guides/state-sharding.md.

The layout is tensor parallelism over one mesh axis. The trainer's own states are sharded by logical names and rules
(`state.shardings`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from trainer.ops.paths import Path, by_path

# The mesh axis, and the names of the projections in `nnx.MultiHeadAttention`.
MODEL = "model"
_TO_HEADS, _FROM_HEADS = ("query", "key", "value"), "out"


def pick_spec(leaf: Any, path: Sequence[str] = ()) -> PartitionSpec:
    """Returns the PartitionSpec of one leaf of a state.

    A kernel (a layer's weights) is sharded along its outputs, and a bias or scale of these outputs likewise. The
    weights of attention are sharded along the heads.

    Args:
      leaf: an array, or any object with `ndim`.
      path: the names of the leaf in the state, such as ("attention", "query", "kernel"). Without a path, the result
        depends only on the rank. It is then wrong for the weights of attention, which have the same rank as those of
        1-D convolutions.
    """
    layer, name = (("", "") + tuple(path))[-2:]
    match leaf.ndim:
        case 0:
            return PartitionSpec()
        case 1:  # bias, scale, running mean
            return PartitionSpec(MODEL)
        case 2 if name == "bias":  # bias of the query, key or value projection: [heads, head_dim]
            return PartitionSpec(MODEL, None)
        case 3 if layer in _TO_HEADS:  # [features, heads, head_dim]
            return PartitionSpec(None, MODEL, None)
        case 3 if layer == _FROM_HEADS:  # [heads, head_dim, features]
            return PartitionSpec(MODEL, None, None)
        case ndim:  # [inputs, outputs], embedding [entries, features], convolution [*window, inputs, outputs]
            return PartitionSpec(*[None] * (ndim - 1), MODEL)


def state_layout(state: nnx.State) -> nnx.State:
    """Returns a tree of PartitionSpecs with the structure of `state`: `pick_spec` of each leaf.

    A bias is sharded like the outputs of its kernel, so that adding it needs no communication.
    """
    ranks = {path: leaf.ndim for path, leaf in _leaves(state).items()}
    specs = {path: pick_spec(leaf, path) for path, leaf in _leaves(state).items()}
    for path, kernel in specs.items():
        bias = (*path[:-1], "bias")
        if path[-1] == "kernel" and bias in specs:
            specs[bias] = PartitionSpec(*kernel[len(kernel) - ranks[bias] :])
    return jax.tree.unflatten(jax.tree.structure(state), specs.values())


def state_to_sharded_layout(seed: Any, x: jax.Array, features: Any) -> jax.Array:
    """Returns the number of leaves in the layout of an `nnx.Linear` that accepts `x`, as float32 [1].

    Args:
      seed, features: the seed and the output size of the layer; floats are converted to integers.
      x: [..., inputs].
    """
    layer = nnx.Linear(x.shape[-1], int(features), rngs=nnx.Rngs(int(seed)))
    specs = state_layout(nnx.state(layer))
    return jnp.array([len(jax.tree.leaves(specs))], jnp.float32)


def _leaves(state: nnx.State) -> dict[Path, Any]:
    # The last entry of a path is the key of the Variable's value.
    return {path[:-1]: leaf for path, leaf in by_path(state).items()}
