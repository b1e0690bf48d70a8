"""Selects the weights that N:M sparsity keeps."""

from math import prod

import jax
from qwix._src.core import sparsity

from trainer.products.plain import Kernel


def largest(kernel: Kernel, value: jax.Array, n: int, m: int) -> jax.Array:
    """Returns the bool mask of the entries of `value` that are kept: of every `m` consecutive entries along the input
    axis, the `n` with the largest magnitude. Among equal magnitudes, the first entries are kept.

    Several input axes are merged, in order, into one. `m` must divide the length of the input axis.

    Args:
      value: [*stacked, *groups, *in, *out] of `kernel`, in any floating-point dtype.
    """
    shape, inputs, outputs = value.shape, prod(kernel.in_shape), prod(kernel.out_shape)
    above = shape[: len(shape) - len(kernel.in_shape) - len(kernel.out_shape)]
    return sparsity.get_sparsity_mask(value.reshape(*above, inputs, outputs), n, m, order="C").reshape(shape)
