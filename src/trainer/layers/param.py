"""Parameters and buffers."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.sharding import Axes, axes_of_parts

# The dtype, regardless of `weight_dtype`, of parameters other than kernels and embedding tables: scales and biases of
# norms, biases of projections, attention sinks, adapters. These parameters take little memory, and bfloat16 would lose
# most of their updates.
EXACT = jnp.dtype("float32")


@functools.partial(jax.jit, static_argnums=(1, 2), static_argnames="batch_axis")
def lecun_normal(
    key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, *, batch_axis: tuple[int, ...] = ()
) -> jax.Array:
    """Returns a normal sample, truncated at two standard deviations, with variance 1 / fan-in; fan-in is the size of
    the second-to-last axis. The function is jitted so that kernels of equal shape share one trace. Otherwise,
    tracing would take half of the time of making a model."""
    return jax.nn.initializers.lecun_normal(batch_axis=batch_axis)(key, shape, dtype)


def param(value: Any, names: Sequence[str | None]) -> nnx.Param:
    """Returns a parameter whose axes have the logical `names`, which the package `sharding` reads. No mesh is needed.

    `value` is an array, or a pytree of its parts (`sharding.axes_of_parts`).
    """
    return nnx.Param(value, out_sharding=tuple(names), eager_sharding=False)


def unnamed(ndim: int, leading: Sequence[str] = ()) -> tuple[str | None, ...]:
    """Returns default axis names for a parameter without names. Only blocks of custom families have such parameters.

    `leading`: the names of the leading axes that the parameter's stack adds (`Stack.axes`).
    """
    return (*leading, *[None] * (ndim - len(leading)))


def axes_of(variable: nnx.Variable, leading: Sequence[str], name: str = "a parameter") -> Any:
    """Returns the logical axes of a parameter; for a pytree of arrays, a pytree with the axes of each array. `leading`:
    see `unnamed`."""
    given, value = variable.get_metadata().get("out_sharding"), variable.get_value()
    ndim = max(part.ndim for part in jax.tree.leaves(value))
    return axes_of_parts(Axes(given or unnamed(ndim, leading)), value, name)


REST = "rest"  # the name of buffers in a TrainTree, and of their collection in Linen


def buffer(value: Any, names: Sequence[str | None]) -> "Buffer":
    """Returns a buffer whose axes have the logical `names`; see `param` for the arguments."""
    return Buffer(value, out_sharding=tuple(names), eager_sharding=False)


@nnx.register_variable_name(REST)
class Buffer(nnx.Variable):
    """State without gradients that the forward pass reads, such as a router's bias. Update rules can change it."""
