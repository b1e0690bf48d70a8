"""The layout of weights for decode steps.

A decode step reads every weight once, so each product should read its weights in place. But a rolled loop over layers
first copies a layer's weights out of the stacked arrays. If the loop is unrolled, each layer has separate arrays
(`Layers`). The program stacks these arrays for the model, the model slices them again, and XLA removes both operations.
docs/decisions/0027-weights-of-decoding.md has the reasons and the cost.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.inference.served import Served
from trainer.layers.cache import Layers
from trainer.sharding import LAYERS


def abstract_weights(served: Served) -> tuple[Any, Any]:
    """Returns a description of the (params, rest) that the programs for `served` take.

    The description has the structure of canonical variables, with `Layers` in place of stacked arrays unless the loop
    over layers is rolled. Each leaf is a ShapeDtypeStruct with a sharding.
    """

    def held(it: jax.ShapeDtypeStruct, names: Sequence[str | None]) -> Any:
        if served.config.scan_layers or names[:1] != (LAYERS,):
            return jax.ShapeDtypeStruct(it.shape, it.dtype, sharding=served.sharding(names, it.shape))
        shape = it.shape[1:]
        one = jax.ShapeDtypeStruct(shape, it.dtype, sharding=served.sharding(names[1:], shape))
        return Layers([one] * it.shape[0])

    return jax.tree.map(held, served.model.abstract, (served.model.param_axes, served.model.rest_axes))


def to_weights(variables: Any, served: Served, donate: bool) -> tuple[Any, Any]:
    """Returns canonical variables in the form that `abstract_weights` describes, with the same dtypes and shardings.

    Leaves are converted one by one, so at most one leaf exists in both forms. NumPy arrays are split on the host.

    Args:
      variables: (params, rest), whose leaves are JAX arrays on any devices, or NumPy arrays.
      donate: whether to delete each JAX array immediately after it is split or cast. Arrays that need
        neither may be shared with the result.
    """

    def convert(like: jax.ShapeDtypeStruct, held: Any, array: Any) -> Any:
        cut = isinstance(held, Layers)
        if isinstance(array, np.ndarray):
            array = array.astype(like.dtype, copy=False)
            if cut:
                return Layers([jax.device_put(array[i], one.sharding) for i, one in enumerate(held.each)])
        placed = jax.device_put(array, like.sharding)
        made = Layers([_layer(placed, i, one) for i, one in enumerate(held.each)]) if cut else placed.astype(like.dtype)
        if donate and (cut or placed.dtype != like.dtype):
            jax.block_until_ready(made)  # otherwise all leaves would be converted at once
            for source in (placed, array):
                if isinstance(source, jax.Array):
                    source.delete()
        return made

    return jax.tree.map(convert, served.abstract_variables, abstract_weights(served), variables)


def canonical(weights: Any) -> Any:
    """Returns `weights` in canonical form. `weights`: all variables, or a part of them, in the form that
    `abstract_weights` describes."""

    def stacked(it: Any) -> Any:
        return jnp.stack(it.each) if isinstance(it, Layers) else it

    return jax.tree.map(stacked, weights, is_leaf=lambda it: isinstance(it, Layers))


# One program for all layers: a program with one output per layer would take several times as long to compile.
@functools.partial(jax.jit, static_argnums=2)
def _layer(stacked: jax.Array, i: int, like: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.lax.with_sharding_constraint(stacked[i].astype(like.dtype), like.sharding)
