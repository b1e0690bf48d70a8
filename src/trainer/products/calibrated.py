"""Quantizes a trained kernel with calibration statistics of its inputs. Qwix does the rounding and scaling.

- `awq`: scales weights before rounding, so that the weights of large activations lose less precision (Lin et al. 2023,
  arXiv:2306.00978).
- `gptq`: rounds the weights input by input; later inputs compensate for earlier errors (Frantar et al.,
  arXiv:2210.17323).

Kernels are [in, out], or [groups, in, out] for experts; several input axes are merged into one axis, and so are
several output axes. The results are `qwix.QArray`s: qvalue has the kernel's shape, and scale is
[*groups, in / block, out].
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from qwix import QArray, dequantize
from qwix._src.core import numerics, qarray
from qwix.contrib import awq_core, gptq_core

from trainer.config.errors import UserError

COLUMNS = 16  # the most columns that GPTQ computes in one iteration of its loop
DAMPING = 0.01  # GPTQ adds this fraction of the mean of the Hessian's diagonal to the diagonal, as published


@dataclass(frozen=True)
class How:
    """How a kernel is quantized.

    Attributes:
      dtype: the stored dtype, such as "int4", "int8", "float8_e4m3fn" or "nf4".
      block: the number of inputs that share a scale; 0: all inputs of an output share one scale.
      method: Qwix's calibration method; with "minmax", integers also have a zero point for each scale.
    """

    dtype: str
    block: int = 0
    method: str = "absmax"

    @property
    def asymmetric(self) -> bool:
        """Whether there are zero points."""
        return self.method == "minmax"

    def of_rows(self) -> qarray.HowToQuantize:
        """Returns Qwix's equivalent settings for a matrix [out, in]."""
        return qarray.HowToQuantize(
            qtype=self.dtype if self.dtype == "nf4" else jnp.dtype(self.dtype),
            channelwise_axes=(0,),
            tiled_axes={1: self.block} if self.block else {},
            calibration_method=self.method,
        )


def awq(kernel: jax.Array, mean_abs: jax.Array, how: How, name: str = "a kernel") -> tuple[QArray, jax.Array]:
    """Returns the quantized kernel and its AWQ scales, float32 [*groups, in].

    Before rounding, the weights of each input are multiplied by the input's AWQ scale; the caller must divide the
    activations by it. An expert without activations gets AWQ scales of 1, so it is only rounded. Qwix tries 20
    candidate scales at once; its temporaries take 41 times the size of the float32 kernel.

    Args:
      mean_abs: the mean magnitude of each input's activations, [*groups, in].

    Raises:
      UserError: see `check`.
    """
    check(kernel.shape[-2], how, name)
    return _awq(kernel, mean_abs, how=how)


def gptq(kernel: jax.Array, hessian: jax.Array, how: How, name: str = "a kernel") -> QArray:
    """Returns the quantized kernel.

    The weights of an input whose activations are all zero are only rounded, and so is an expert without activations.
    (Qwix alone would set these weights to zero.)

    Args:
      hessian: the sum of x x^T over activations x, [*groups, in, in].

    Raises:
      UserError: see `check`; `how` is asymmetric, which Qwix's GPTQ cannot compute; or the Hessian has no inverse.
    """
    check(kernel.shape[-2], how, name)
    if how.asymmetric:
        raise UserError(f"{name}: GPTQ has no asymmetric form; choose symmetric quantization, or AWQ")
    found, inverted = _gptq(kernel, hessian, how=how)
    if not inverted.all():
        raise UserError(f"{name}: GPTQ cannot invert the Hessian of its inputs; calibrate with other text, or use AWQ")
    return found


def values(quantized: QArray, scales: jax.Array | None = None) -> jax.Array:
    """Returns the dequantized kernel, divided by its AWQ scales (see `awq`) if `scales` are given."""
    found = dequantize(quantized)
    return found if scales is None else found / scales[..., None]


def check(inputs: int, how: How, name: str) -> None:
    """Raises UserError if `how.block` does not divide the number of inputs of a kernel."""
    if how.block and inputs % how.block:
        raise UserError(
            f"{name}: its {inputs} inputs are not a multiple of {how.block}, the number of inputs that share a scale; "
            "choose another number, or leave the kernel float"
        )


@functools.partial(jax.jit, static_argnames="how")
def _awq(kernel: jax.Array, mean_abs: jax.Array, how: How) -> tuple[QArray, jax.Array]:
    def one(matrix: jax.Array, mean_abs: jax.Array) -> tuple[QArray, jax.Array]:
        quantized, scales = awq_core.quantize_weight(matrix, mean_abs, how.of_rows())
        return quantized.T, scales[0]

    return _each(one, kernel, mean_abs)


@functools.partial(jax.jit, static_argnames="how")
def _gptq(kernel: jax.Array, hessian: jax.Array, how: How) -> tuple[QArray, jax.Array]:
    # By default a TPU multiplies float32 as bfloat16, and a GPU as TF32.
    with jax.default_matmul_precision("float32"):
        return _each(functools.partial(_by_blocks, how), kernel, hessian)


def _each(fn: Callable[..., Any], kernel: jax.Array, *statistics: jax.Array) -> Any:
    """Calls `fn(matrix, *statistics)` for each group, one by one. `matrix` is the group's kernel, float32 [out, in]."""
    args = kernel.mT.astype(jnp.float32), *statistics
    return fn(*args) if kernel.ndim == 2 else jax.lax.map(lambda args: fn(*args), args)


def _by_blocks(how: How, matrix: jax.Array, hessian: jax.Array) -> tuple[QArray, jax.Array]:
    """Runs Qwix's GPTQ on blocks of columns in order. Also returns whether the Hessian has an inverse.

    Qwix unrolls all columns: under jit, compiling 256 columns takes a minute; without jit, Qwix compiles a program for
    each index. This function runs one program for a few columns in a loop. Up to the order of summation, the result
    equals Qwix's with blocksize=`columns`. Let H^-1 = U^T U, where U is upper triangular. For a block b of columns, let
    w be its weights, U_b its rows of U, and U_bb its rows and columns of U. The block is quantized with the Hessian
    (U_bb^T U_bb)^-1. Then (w - w_quantized) U_bb^-1 U_b is subtracted from the matrix, so that later columns compensate
    for the block's quantization error.

    Columns are divided by their scale before quantization, so one scale can span several iterations.
    """
    inputs = len(hessian)
    block = how.block or inputs
    columns = math.gcd(COLUMNS, block)
    dtype = jnp.dtype(how.dtype)
    # On a CPU, a loop that stacks int4 takes ten times as long.
    stacked = jnp.dtype("int8") if how.dtype == "int4" else dtype
    bound = numerics.get_symmetric_bound(dtype)
    of_scaled = qarray.HowToQuantize(qtype=dtype, calibration_method=f"fixed,{-bound},{bound}")
    of_block = dataclasses.replace(how, block=0).of_rows()
    upper = _factor(hessian)

    def turn(carry: Any, start: jax.Array) -> tuple[Any, Any]:
        matrix, scale = carry
        scale = jax.lax.cond(
            start % block == 0,
            lambda: gptq_core.find_params(jax.lax.dynamic_slice_in_dim(matrix, start, block, axis=1), of_block)[0],
            lambda: scale,
        )
        own = jax.lax.dynamic_slice_in_dim(matrix, start, columns, axis=1)
        rows = jax.lax.dynamic_slice_in_dim(upper, start, columns)
        inverse = solve_triangular(jax.lax.dynamic_slice_in_dim(rows, start, columns, axis=1), jnp.eye(columns))
        hessian = inverse @ inverse.T
        found, _ = gptq_core.quantize_weight(own / scale, hessian, of_scaled, blocksize=columns, percdamp=0.0)
        error = own - dequantize(found) * scale
        return (matrix - error @ inverse @ rows, scale), (found.qvalue.T.astype(stacked), scale[:, 0])

    _, (qvalue, scale) = jax.lax.scan(turn, (matrix, matrix[:, :1]), jnp.arange(0, inputs, columns))
    return QArray(qvalue.reshape(inputs, -1).astype(dtype), scale[:: block // columns]), jnp.isfinite(upper).all()


def _factor(hessian: jax.Array) -> jax.Array:
    """Returns the upper triangular U with U^T U = H^-1, where H is the Hessian, damped as in Qwix.

    In H, the row and column of an input without activations contain only the damping, on the diagonal, so the input's
    rounding error does not affect other inputs.
    """
    mean = jnp.mean(jnp.diag(hessian))
    damped = hessian + jnp.where(mean == 0, 1.0, DAMPING * mean) * jnp.eye(len(hessian))
    lower = jnp.linalg.cholesky(damped)
    return jnp.linalg.cholesky(gptq_core.cholesky_inverse(lower), upper=True)
