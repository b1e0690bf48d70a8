"""Products with low-rank adapters (Hu et al. 2021, arXiv:2106.09685).

Letters in shapes: i inputs, o outputs, r the rank; g groups, if the kernel has groups. i and o may be several axes.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.layers.param import param
from trainer.products.context import Context
from trainer.products.plain import EarlyReduction, Kernel, MakeProduct, make_plain, product, stored


class Adapted(nnx.Module):
    """A `Product` with an adapter: it multiplies by the kernel of `inner` plus scale * a @ b, where a [*i, r] and
    b [r, *o] are parameters.

    Initially b is zero, and a is uniform in +-1 / sqrt(i), as in Hugging Face's PEFT.

    Several adapters are stored as one, with their ranks concatenated: `context.ranks` selects the ranks that each row
    uses.
    """

    def __init__(
        self,
        inner: Any,
        kernel: Kernel,
        *,
        rank: int,
        scale: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        make: MakeProduct = make_plain,
    ):
        """`dtype`: the dtype of a and b. `make`: makes the product with a and the product with b, neither of which may
        have parameters."""
        groups, first = kernel.names[: bool(kernel.groups)], bool(kernel.groups) + len(kernel.in_shape)
        lead, bound = (kernel.groups,) * len(groups), 1 / math.sqrt(math.prod(kernel.in_shape))
        a = jax.random.uniform(rngs.params(), (*lead, *kernel.in_shape, rank), dtype, -bound, bound)
        self.lora_a = param(a, (*kernel.names[:first], None))
        self.lora_b = param(jnp.zeros((*lead, rank, *kernel.out_shape), dtype), (*groups, None, *kernel.names[first:]))
        self.inner = nnx.data(inner) if isinstance(inner, nnx.Module) else inner
        self.scale = scale
        self.into: Any = make(kernel._replace(out_shape=(rank,)), rngs=rngs)
        self.out_of: Any = make(kernel._replace(in_shape=(rank,)), rngs=rngs)

    def store(self, kernel: jax.Array) -> Any:
        return stored(self.inner, kernel)

    def array(self, kernel: Any, dtype: jnp.dtype) -> jax.Array | None:
        if hasattr(self.inner, "array"):
            kernel = self.inner.array(kernel, dtype)
        elif self.inner is not product:
            return None
        return None if kernel is None else kernel.astype(dtype) + self.delta(kernel.ndim).astype(dtype)

    def delta(self, ndim: int) -> jax.Array:
        """Returns the adapter's addition to a kernel of `ndim` axes."""
        return delta(self.lora_a.get_value(), self.lora_b.get_value(), self.scale, ndim)

    def __call__(
        self,
        x: jax.Array,
        inputs: int,
        kernel: Any,
        reduce_early: EarlyReduction | None = None,
        context: Context | None = None,
    ) -> jax.Array:
        del reduce_early  # the kernel is frozen: it has no gradient
        low = self.scale * self.into(x, inputs, self.lora_a.get_value(), None, None)
        if context is not None and context.ranks is not None:
            low = jnp.where(context.ranks, low, 0)
        return self.inner(x, inputs, kernel, None, context) + self.out_of(low, 1, self.lora_b.get_value(), None, None)


class GroupedAdapted(Adapted):
    """`Adapted` for a `GroupedProduct`: one adapter per group, with a [g, *i, r] and b [g, r, *o]."""

    def __call__(  # type: ignore[override]
        self, x: jax.Array, kernel: Any, sizes: jax.Array | None, context: Context | None = None
    ) -> jax.Array:
        low = self.scale * self.into(x, self.lora_a.get_value(), sizes, None)
        return self.inner(x, kernel, sizes, context) + self.out_of(low, self.lora_b.get_value(), sizes, None)


def delta(a: Any, b: Any, scale: float, ndim: int) -> Any:
    """Returns scale * a @ b, [*stacked, *i, *o], which an adapter adds to a kernel of `ndim` axes.

    Args:
      a: [*stacked, *i, r], a JAX or NumPy array.
      b: [*stacked, r, *o]. The stacked axes are layers and groups.
    """
    stacked = a.ndim + b.ndim - 2 - ndim
    lead = a.shape[:stacked]
    rank, inputs, outputs = a.shape[-1], a.shape[stacked:-1], b.shape[stacked + 1 :]
    out = a.reshape(*lead, -1, rank) @ b.reshape(*lead, rank, -1)
    return (scale * out).reshape(*lead, *inputs, *outputs)
