"""Products that collect statistics of their inputs while a block runs.

Each product returns the result of a plain product and passes the statistics to its `Recorder`. Call the block within
`Recorder.collect`, with or without `jax.jit`, but outside of `jax.checkpoint` and loops.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.config.errors import UserError
from trainer.layers.moe import MoE
from trainer.ops.experts import by_expert
from trainer.ops.grouped import OVER_ROWS
from trainer.ops.routing import Routing
from trainer.products.context import Context
from trainer.products.plain import EarlyReduction, Kernel, grouped_product, product


class Statistics(NamedTuple):
    """Float32 sums over the inputs x of a kernel, excluding padding. Several input axes are merged into one.

    The sums of an expert include only the tokens that are routed to it.
    """

    rows: jax.Array  # [*groups], the number of inputs
    absolute: jax.Array  # [*groups, in], sums of |x|
    hessian: jax.Array | None  # [*groups, in, in], sums of x x^T; None if not collected

    def mean_abs(self) -> jax.Array:
        """Returns the means of |x|, [*groups, in]. They are 0 for an expert without tokens."""
        return self.absolute / jnp.maximum(self.rows, 1)[..., None]

    def plus(self, other: "Statistics") -> "Statistics":
        """Returns the statistics over the inputs of both `self` and `other`."""
        return jax.tree.map(jnp.add, self, other)


def empty(kernel: Kernel, hessian: bool) -> Statistics:
    """Returns the statistics of a kernel that has received no inputs. `hessian`: whether Hessians are collected."""
    groups, inputs = (kernel.groups,) * bool(kernel.groups), prod(kernel.in_shape)
    zeros = Statistics(jnp.zeros(groups), jnp.zeros((*groups, inputs)), None)
    return zeros._replace(hessian=jnp.zeros((*groups, inputs, inputs))) if hessian else zeros


def of_rows(x: jax.Array, real: jax.Array, hessian: bool) -> Statistics:
    """Returns the statistics of the rows of `x` [n, in] for which `real`, bool [n], is true."""
    x = jnp.where(real[:, None], x, 0)
    squares = _summed(jax.lax.dot_general, x, (((0,), (0,)), ((), ()))) if hessian else None
    return Statistics(real.sum(dtype=jnp.float32), jnp.abs(x.astype(jnp.float32)).sum(0), squares)


def of_groups(x: jax.Array, real: jax.Array, size_g: jax.Array, hessian: bool) -> Statistics:
    """Returns the statistics of each group of rows, excluding the rows for which `real`, bool [n], is false.

    `x` [n, in] is sorted by group. `size_g`: the number of rows of each group.
    """
    x, groups = jnp.where(real[:, None], x, 0), len(size_g)
    group_n = jnp.repeat(jnp.arange(groups), size_g, total_repeat_length=len(x))

    def total(values: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values.astype(jnp.float32), group_n, groups)

    squares = _summed(jax.lax.ragged_dot_general, x, size_g, OVER_ROWS) if hessian else None
    return Statistics(total(real), total(jnp.abs(x)), squares)


def _summed(multiply: Callable[..., jax.Array], x: jax.Array, *how: Any) -> jax.Array:
    """Returns sums of products of `x` with itself. The product of two bfloat16 values is exact in float32."""
    return multiply(x, x, *how, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class Recorder:
    """Creates products that record statistics, and stores the statistics. Recorders compare by identity."""

    def __init__(self, hessian: bool):
        self.hessian = hessian
        self.found: dict[str, Statistics] = {}
        self.routing: Routing | None = None  # the routing of the MoE layer that is running

    def use_in(self, module: nnx.Module) -> None:
        """Prepares the experts in `module` to drop no tokens and to record their routing."""
        for _, layer in list(nnx.iter_modules(module)):
            if isinstance(layer, MoE):
                layer.sparse, layer.score = True, _Score(self, layer.score)

    def product(self, kernel: Kernel, name: str) -> Any:
        """Returns a product for `kernel` that records statistics under `name`."""
        return (_Grouped if kernel.groups else _Dense)(self, name)

    def collect(self, call: Callable[[], Any]) -> tuple[Any, dict[str, Statistics]]:
        """Returns the result of `call()` and the statistics that the products collected during the call."""
        self.found, self.routing = {}, None
        out = call()
        found, self.found, self.routing = self.found, {}, None
        return out, found

    def add(self, name: str, statistics: Statistics) -> None:
        """Adds the statistics of one use of the kernel `name`."""
        self.found[name] = self.found[name].plus(statistics) if name in self.found else statistics


@dataclass(frozen=True)
class _Score:
    """A `Score` that records the routing that it returns, so that `_Grouped` can determine which rows of the experts'
    inputs are padding."""

    recorder: Recorder
    score: Any

    def __call__(self, *args: Any) -> Routing:
        self.recorder.routing = self.score(*args)
        return self.recorder.routing


@dataclass(frozen=True)
class _Dense:
    """A `Product` that records statistics."""

    recorder: Recorder
    name: str

    def __call__(
        self,
        x: jax.Array,
        inputs: int,
        kernel: jax.Array,
        reduce_early: EarlyReduction | None = None,
        context: Context | None = None,
    ) -> jax.Array:
        assert context is not None, self.name
        rows = x.shape[: x.ndim - inputs]
        real = jnp.broadcast_to(context.segments != 0, rows).reshape(-1)
        self.recorder.add(self.name, of_rows(x.reshape(len(real), -1), real, self.recorder.hessian))
        return product(x, inputs, kernel, reduce_early, context)


@dataclass(frozen=True)
class _Grouped:
    """A `GroupedProduct` that records statistics."""

    recorder: Recorder
    name: str

    def __call__(
        self, x: jax.Array, kernel: jax.Array, sizes: jax.Array | None, context: Context | None = None
    ) -> jax.Array:
        routing = self.recorder.routing
        if routing is None or sizes is None or context is None:
            raise UserError(
                f"{self.name}: only experts of trainer.layers.moe.MoE can be calibrated; leave these float, or round "
                "them without calibration"
            )
        real, _, _ = by_expert((context.segments != 0)[..., None], routing, len(sizes))
        self.recorder.add(self.name, of_groups(x, real[:, 0], sizes, self.recorder.hessian))
        return grouped_product(x, kernel, sizes, context)
