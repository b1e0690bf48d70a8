"""The cost of kernels that are opaque to the compiler.

A Pallas kernel appears as a custom call. If the HLO text contains the author's `pl.CostEstimate`, the estimate is used.
Otherwise, a formula chosen by the kernel's name computes the cost from the operands' shapes: the grid size times the
cost of one execution of the body.
On GPUs, cuBLAS products and cuDNN attention are custom calls, too; they have their own formulas.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jax.errors import JaxRuntimeError

from trainer.aot.hlo import Instruction, Shape, bits
from trainer.config.errors import UserError

PALLAS = "tpu_custom_call"


_OUT_OF_VMEM = re.compile(
    r"memory space vmem while allocating on stack for %?(splash_\w+).*?size ([\d.]+\w?) and limit ([\d.]+\w?)",
    re.DOTALL,
)


class KernelCost(NamedTuple):
    """The cost of one call. `bytes`: bytes read and written; if None, each operand and result is accessed once."""

    flops: float
    transcendentals: float
    bytes: float | None
    dtype: str


Formula = Callable[[Instruction, Sequence[Shape]], KernelCost]


@contextlib.contextmanager
def tiles_fit() -> Iterator[None]:
    """Wraps a compilation: raises UserError if the tiles of splash attention exceed the chip's vector memory."""
    try:
        yield
    except JaxRuntimeError as error:
        if not (match := _OUT_OF_VMEM.search(str(error))):
            raise
        raise UserError(
            f"sa_block_*: {match[1]} needs {match[2]} of the chip's vector memory, but a kernel may use {match[3]}; "
            "choose smaller tiles, or leave these keys at 0"
        ) from None


def computes(call: Instruction) -> bool:
    """Returns whether a custom call may compute anything. Other calls only annotate memory or async operations."""
    target = call.attribute("custom_call_target").strip('"')
    return target == PALLAS or target.startswith(("__", "xla.gpu", "triton", "cu", "onednn", "lapack", "mosaic"))


def cost(call: Instruction, operands: Sequence[Shape]) -> KernelCost | None:
    """Returns the cost of a custom call; None if it is unknown."""
    dtype = next((shape.dtype for shape in operands if shape.dtype[0] in "bf"), "f32")
    given = re.search(r'"cost_estimate":(\{[^{}]*\})', call.text)
    if given:
        numbers = {name: float(value) for name, value in json.loads(given[1]).items()}
        return KernelCost(numbers["flops"], numbers["transcendentals"], numbers["bytes_accessed"], dtype)
    target = call.attribute("custom_call_target").strip('"')
    for prefix, formula in GPU_FORMULAS:
        if target.startswith(prefix):
            return formula(call, operands)
    for pattern, formula in FORMULAS:
        if PALLAS in call.text and re.search(pattern, call.op_name):
            return formula(call, operands)
    return None


def _splash(products: int, suffix: str, resident: int = 2, keys_resident: bool = False) -> Formula:
    """Returns the cost formula of a splash attention kernel (jax.experimental.pallas.ops.tpu.splash_attention).

    Args:
      products: the number of matrix products per visited block of scores.
      suffix: the suffix of the names of the kernel's block sizes.
      resident: the number of tensors that keep one block in VMEM while blocks of two other tensors are streamed from
        HBM. The streamed blocks are read once for every visited block of scores.
      keys_resident: if true, blocks of keys and values are resident, and blocks of queries and of the output's gradient
        are streamed. If false, keys and values are streamed.

    If a row's queries are sharded over devices, the cost is the mean over the devices.

    With a sliding window, the fused backward kernel still has a full-width grid, and the HLO text does not show which
    blocks it skips. Its cost is therefore computed as if there were no window.
    """

    def formula(call: Instruction, operands: Sequence[Shape]) -> KernelCost:
        query, key = [shape for shape in operands if shape.dtype[0] in "bf"][:2]
        length, width = _length_and_width(query, "q", call)
        heads = query.elements // (length * width)
        blocks = {name: int(size) for name, size in re.findall(r'\\"(block_\w+)\\": (\d+)', call.text)}
        block_q, block_kv = (blocks.get(f"block_{side}{suffix}", length) for side in ("q", "kv"))
        keys = _length_and_width(key, "k", call)[0]
        rows, columns, shares = length // block_q, keys // block_kv, keys // length
        # The grid's width is the maximum number of blocks that the kernel visits in a row of blocks. A sliding window
        # reduces it.
        grid = operands[0].dims if operands[0].dtype[0] in "su" else (rows, columns)
        steps = grid[-2] * shares if keys_resident else grid[-1]
        visited = heads * _visited(rows * shares, columns, block_q, block_kv, steps, keys_resident) / shares
        scores = visited * block_q * block_kv
        # The fused kernel also returns the queries' gradient, as one partial sum for each block of keys.
        fused = keys_resident and any(len(shape.dims) > len(query.dims) for shape in call.shapes)
        kept, streamed = (columns * block_kv, visited * block_q) if keys_resident else (length, visited * block_kv)
        read = width * (resident * heads * kept + 2.0 * streamed) * bits(query.dtype) / 8
        written = sum(shape.bytes for shape in call.shapes)
        return KernelCost(2.0 * (products + fused) * scores * width, scores, read + written, query.dtype)

    return formula


def _length_and_width(shape: Shape, tensor: str, call: Instruction) -> tuple[int, ...]:
    """Returns (number of tokens, head width) of the queries if `tensor` is "q", or of the keys if it is "k". The order
    of the last two axes of `shape` depends on the call."""
    layout = re.search(rf'\\"{tensor}_layout\\": (\d+)', call.text)
    seq_minor = layout is not None and layout[1] == "2"  # QKVLayout.SEQ_MINOR
    return shape.dims[-2:][::-1] if seq_minor else shape.dims[-2:]


def _visited(rows: int, columns: int, block_q: int, block_kv: int, steps: int, keys_resident: bool) -> int:
    """Returns the number of score blocks that a causal kernel visits: at most `steps` per row of blocks or, if
    `keys_resident` is true, per column of blocks."""
    if keys_resident:
        return sum(min(steps, rows - j * block_kv // block_q) for j in range(columns))
    return sum(min(steps, -(-(i + 1) * block_q // block_kv)) for i in range(rows))


# The comments list the matrix products of each kernel.
FORMULAS: tuple[tuple[str, Formula], ...] = (
    (r"splash_\w*fwd", _splash(2, "", resident=1)),  # scores, output
    (r"splash_\w*dkv", _splash(4, "_dkv", keys_resident=True)),  # scores, dV, dP, dK
    (r"splash_\w*dq", _splash(3, "_dq")),  # scores, dP, dQ
)


def _cublas(call: Instruction, operands: Sequence[Shape]) -> KernelCost:
    """Returns the cost of a cuBLAS product, which has the shapes and dimension numbers of a `dot`."""
    contracted = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', call.text)
    assert contracted, call.text
    width = math.prod(operands[0].dims[int(axis)] for axis in re.findall(r"\d+", contracted[1]))
    flops = 2.0 * call.shape.elements * width
    return KernelCost(flops, 0.0, _without_workspace(call, operands), operands[0].dtype)


def _cudnn_attention(call: Instruction, operands: Sequence[Shape]) -> KernelCost:
    """Returns the cost of cuDNN's fused attention, whose operands begin with queries, keys and values [b, t, h, d].

    Counts the scores that the causal mask, the window and the documents leave unmasked. The kernel computes
    slightly more, because it processes whole tiles. Lengths are known only at run time. We assume that the documents of
    a row fill it and have equal lengths: other lengths need more, but the kernel skips the padding of rows that are not
    full.
    The forward kernel computes two products: scores and results. The backward kernel computes five: scores, and the
    gradients of probabilities, values, queries and keys.
    """
    query, key, value = operands[:3]
    batch, length, heads, width = query.dims
    documents = _number(call, "max_seg_per_batch", 1)
    rows, columns = length / documents, key.dims[1] / documents
    window = min(_number(call, "sliding_window_length", 0) or columns, columns)
    scores = rows * columns
    if re.search(r'"mask_type":\s*"\w*CAUSAL', call.text):
        least = min(rows, window)
        scores = least * (least + 1) / 2 + (rows - least) * window
    scores *= batch * heads * documents
    backward = "Backward" in call.attribute("custom_call_target")
    widths = 3 * width + 2 * value.dims[-1] if backward else width + value.dims[-1]
    return KernelCost(2.0 * scores * widths, scores, _without_workspace(call, operands), query.dtype)


def _number(call: Instruction, name: str, default: int) -> int:
    found = re.search(rf'"{name}":\s*"?(\d+)', call.text)
    return max(int(found[1]), default) if found else default


def _without_workspace(call: Instruction, operands: Sequence[Shape]) -> float:
    """Returns the total bytes of the operands and results. If there are several results, the last one is a workspace
    and is not counted."""
    results = call.shapes if len(call.shapes) == 1 else call.shapes[:-1]
    return float(sum(shape.bytes for shape in (*operands, *results)))


GPU_FORMULAS: tuple[tuple[str, Formula], ...] = (("__cublas$", _cublas), ("__cudnn$fmha", _cudnn_attention))
