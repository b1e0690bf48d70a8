"""Operation counts of matrix products, computed from the shapes of their operands and results."""

import functools
import math
import re

import numpy as np

from trainer.aot.hlo import Computation, Instruction, Shape

_GROUPS = re.compile(r'"is_ragged_dot":true,"num_groups_in_ragged_dot":"(\d+)"')


def dot(product: Instruction, left: Shape) -> float:
    """Returns the operation count of a `dot` whose left operand has the shape `left`."""
    width = math.prod(left.dims[axis] for axis in product.numbers("lhs_contracting_dims"))
    return 2.0 * product.shape.elements * width


def window(i: Instruction, name: str) -> list[str]:
    """Returns the value of `name` in an attribute such as `window={size=2x3 pad=0_1x0_0 stride=1x1}`, as one string per
    dimension; [] if it is absent."""
    sizes = i.attribute("window").partition(f"{name}=")[2].split(" ")[0].rstrip("}")
    return sizes.split("x") if sizes else []


def convolution(i: Instruction, left: Shape, right: Shape) -> float:
    """Returns the operation count of a `convolution`, excluding operations on padding.

    On a TPU, matrix products are convolutions. Their batch dimensions become window dimensions, in which most positions
    are padding.
    """
    inputs, rest = i.attribute("dim_labels").split("_")
    kernel, outputs = rest.split("->")
    sizes = window(i, "size")
    spatial = [str(n) for n in range(len(sizes))]
    defaults = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
    parts = {name: window(i, name) or [default] * len(sizes) for name, default in defaults.items()}
    valid = 1
    for n in spatial:
        axis = int(n)
        valid *= _valid_positions(
            left.dims[inputs.index(n)],
            right.dims[kernel.index(n)],
            i.shape.dims[outputs.index(n)],
            int(parts["stride"][axis]),
            int(parts["pad"][axis].split("_")[0]),
            int(parts["lhs_dilate"][axis]),
            int(parts["rhs_dilate"][axis]),
        )
    features = left.dims[inputs.index("f")] // int(i.attribute("feature_group_count") or 1)
    batch = left.dims[inputs.index("b")] // int(i.attribute("batch_group_count") or 1)
    return 2.0 * features * batch * i.shape.dims[outputs.index("f")] * valid


def groups(fusion: Instruction) -> int:
    """Returns the number of groups of a grouped product (`jax.lax.ragged_dot`) on a TPU; 1 for other fusions.

    In the HLO text, the fusion multiplies every row by the matrix of every group, and masks the results. On
    the device, the kernel processes for each group only the row tiles that contain rows of this group
    (docs/experiments.md, 2026-11-29).
    """
    found = _GROUPS.search(fusion.text)
    return int(found[1]) if found else 1


def masks(computation: Computation, i: Instruction, groups: int) -> bool:
    """Returns whether an instruction in the fusion of a grouped product selects rows by group, or sums over groups. The
    kernel executes no such instruction."""
    return i.opcode in ("select", "reduce") and computation.operands(i)[0].shape.dims[:1] == (groups,)


@functools.lru_cache(maxsize=1024)
def _valid_positions(size: int, kernel: int, output: int, stride: int, low: int, dilation: int, spread: int) -> int:
    """Returns the number of (output position, kernel position) pairs that read an input element rather than padding."""
    # Output o and kernel position k read position o * stride - low + k * spread. o and k are symmetric: enumerate the
    # shorter range, and count the other range's valid positions in closed form.
    if kernel > output:
        kernel, spread, output, stride = output, stride, kernel, spread
    offset = np.arange(kernel, dtype=np.int64) * spread - low
    # If the dilation divides o * stride + offset, it also divides (o + step) * stride + offset.
    common = math.gcd(stride, dilation)
    step = dilation // common
    residue = -(offset // common) * pow(stride // common, -1, step) % step
    least = np.maximum(0, -(offset // stride))
    most = np.minimum(output - 1, ((size - 1) * dilation - offset) // stride)
    first = least + (residue - least) % step
    return int(np.where(offset % common == 0, np.maximum(0, (most - first) // step + 1), 0).sum())
