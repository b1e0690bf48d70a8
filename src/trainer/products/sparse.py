"""The weights that N:M sparsity keeps."""

from math import prod

import jax
from qwix._src.core import sparsity  # used here and not in `quantized`, because Qwix's masks need no product

from trainer.products.plain import Kernel


def largest(kernel: Kernel, value: jax.Array, n: int, m: int) -> jax.Array:
    """Returns the mask of the used entries of `value`, bool: of every `m` consecutive entries along the axis that a
    product sums over, the `n` with the largest magnitude. Of equal magnitudes, the first are used.

    Several input axes count as one axis, merged in order. `m` must divide the length of that axis.

    Args:
      value: [*stacked, *groups, *in, *out] of `kernel`, in any floating-point dtype.
    """
    shape, inputs, outputs = value.shape, prod(kernel.in_shape), prod(kernel.out_shape)
    above = shape[: len(shape) - len(kernel.in_shape) - len(kernel.out_shape)]
    return sparsity.get_sparsity_mask(value.reshape(*above, inputs, outputs), n, m, order="C").reshape(shape)
