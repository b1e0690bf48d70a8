"""Products with masked kernels."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.layers.param import buffer
from trainer.products.context import Context
from trainer.products.plain import EarlyReduction, GroupedProduct, Kernel, Product


class _Masked(nnx.Module):
    """A product that treats the kernel as zero where `mask` is false. The masked entries get no gradient.

    The mask is a bool buffer with the kernel's shape and logical axes. It is initially true everywhere; an update rule
    changes it (`optim.sparsity`). `inner` computes the product with the masked kernel, so any quantization scales
    depend only on unmasked entries.
    """

    def __init__(self, inner: Product | GroupedProduct, kernel: Kernel):
        groups = (kernel.groups,) if kernel.groups else ()
        self.mask = buffer(jnp.ones((*groups, *kernel.in_shape, *kernel.out_shape), bool), kernel.names)
        self.inner: Any = inner

    def masked(self, kernel: jax.Array) -> jax.Array:
        """Returns the kernel with zeros where the mask is false."""
        return jnp.where(self.mask.get_value(), kernel, 0)


class Sparse(_Masked):
    """A `Product` of a masked kernel."""

    def __call__(
        self,
        x: jax.Array,
        inputs: int,
        kernel: jax.Array,
        reduce_early: EarlyReduction | None = None,
        context: Context | None = None,
    ) -> jax.Array:
        return self.inner(x, inputs, self.masked(kernel), reduce_early, context)


class GroupedSparse(_Masked):
    """A `GroupedProduct` of masked kernels."""

    def __call__(
        self, x: jax.Array, kernel: jax.Array, sizes: jax.Array | None, context: Context | None = None
    ) -> jax.Array:
        return self.inner(x, self.masked(kernel), sizes, context)


def mask_name(kernel: Kernel) -> str:
    """Returns the canonical name of a kernel's mask: LAYER/product/mask; for experts, LAYER/product/NAME/mask."""
    layer, _, name = kernel.name.rpartition("/")
    return f"{layer}/product/{f'{name}/' if kernel.groups else ''}mask"
