"""What a kernel that the compiler cannot look into costs.

A Pallas kernel arrives as a custom call. If its author gave a `pl.CostEstimate` the compiler's text carries it and it
is taken. Else a formula by the kernel's name: its grid times what its body does, from the shapes of its operands.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jax.errors import JaxRuntimeError

from trainer.aot.hlo import Instruction, Shape, bits
from trainer.config import UserError

PALLAS = "tpu_custom_call"


_OUT_OF_VMEM = re.compile(
    r"memory space vmem while allocating on stack for %?(splash_\w+).*?size ([\d.]+\w?) and limit ([\d.]+\w?)",
    re.DOTALL,
)


class KernelCost(NamedTuple):
    """Operations of one call. `bytes`: read and written; None: each operand and result once."""

    flops: float
    transcendentals: float
    bytes: float | None
    dtype: str


Formula = Callable[[Instruction, Sequence[Shape]], KernelCost]


@contextlib.contextmanager
def tiles_fit() -> Iterator[None]:
    """Around a compilation: tiles of splash attention that exceed the chip's vector memory are a UserError."""
    try:
        yield
    except JaxRuntimeError as error:
        if not (found := _OUT_OF_VMEM.search(str(error))):
            raise
        raise UserError(
            f"sa_block_*: {found[1]} needs {found[2]} of the chip's vector memory, and a kernel may take {found[3]}; "
            "give smaller tiles, or leave these keys at 0"
        ) from None


def computes(call: Instruction) -> bool:
    """Whether a custom call may compute; the others only mark memory or the ends of something asynchronous."""
    target = call.attribute("custom_call_target").strip('"')
    return target == PALLAS or target.startswith(("__", "xla.gpu", "triton", "cu", "onednn", "lapack", "mosaic"))


def cost(call: Instruction, operands: Sequence[Shape]) -> KernelCost | None:
    """The cost of a custom call, or None where nothing is known of it."""
    dtype = next((shape.dtype for shape in operands if shape.dtype[0] in "bf"), "f32")
    given = re.search(r'"cost_estimate":(\{[^{}]*\})', call.text)
    if given:
        numbers = {name: float(value) for name, value in json.loads(given[1]).items()}
        return KernelCost(numbers["flops"], numbers["transcendentals"], numbers["bytes_accessed"], dtype)
    for pattern, formula in FORMULAS:
        if PALLAS in call.text and re.search(pattern, call.op_name):
            return formula(call, operands)
    return None


def _splash(products: int, suffix: str, stays: int = 2, keys_stay: bool = False) -> Formula:
    """A kernel of splash attention (jax.experimental.pallas.ops.tpu.splash_attention).

    `products` matrix products for each block of scores that it visits. `suffix`: of its block sizes' names.
    `keys_stay`: a block of keys and values stays on the chip while blocks of queries and of the output's gradient
    pass by; else the other way around. `stays`: how many tensors stay; two pass by. A block is read from main memory
    as often as it arrives. The fused backward kernel visits a grid of full width under a window too, and skips blocks
    within it, which cannot be seen here: its figures are those without the window.
    """

    def formula(call: Instruction, operands: Sequence[Shape]) -> KernelCost:
        query, key = [shape for shape in operands if shape.dtype[0] in "bf"][:2]
        length, width = _length_and_width(query, "q", call)
        heads = query.elements // (length * width)
        blocks = {name: int(size) for name, size in re.findall(r'\\"(block_\w+)\\": (\d+)', call.text)}
        block_q, block_kv = (blocks.get(f"block_{side}{suffix}", length) for side in ("q", "kv"))
        rows, columns = length // block_q, _length_and_width(key, "k", call)[0] // block_kv
        # The grid is as wide as the row of blocks that visits most of them: a window makes it narrow.
        grid = operands[0].dims if operands[0].dtype[0] in "su" else (rows, columns)
        visited = heads * _visited(rows, columns, block_q, block_kv, grid[-2 if keys_stay else -1], keys_stay)
        scores = float(visited * block_q * block_kv)
        # The fused kernel gives the queries' gradient too: a part for each block of keys.
        fused = keys_stay and any(len(shape.dims) > len(query.dims) for shape in call.shapes)
        stay, pass_by = (columns * block_kv, visited * block_q) if keys_stay else (length, visited * block_kv)
        read = width * (stays * heads * stay + 2.0 * pass_by) * bits(query.dtype) / 8
        written = sum(shape.bytes for shape in call.shapes)
        return KernelCost(2.0 * (products + fused) * scores * width, scores, read + written, query.dtype)

    return formula


def _length_and_width(shape: Shape, tensor: str, call: Instruction) -> tuple[int, ...]:
    """Tokens and width of a head of queries (tensor "q") or keys ("k"), in whichever layout the kernel has them."""
    layout = re.search(rf'\\"{tensor}_layout\\": (\d+)', call.text)
    seq_minor = layout is not None and layout[1] == "2"  # QKVLayout.SEQ_MINOR
    return shape.dims[-2:][::-1] if seq_minor else shape.dims[-2:]


def _visited(rows: int, columns: int, block_q: int, block_kv: int, steps: int, keys_stay: bool) -> int:
    """Blocks of scores that a causal kernel visits; under a window at most `steps` a row (keys_stay: a column)."""
    if keys_stay:
        return sum(min(steps, rows - j * block_kv // block_q) for j in range(columns))
    return sum(min(steps, -(-(i + 1) * block_q // block_kv)) for i in range(rows))


FORMULAS: tuple[tuple[str, Formula], ...] = (
    (r"splash_\w*fwd", _splash(2, "", stays=1)),  # scores, output
    (r"splash_\w*dkv", _splash(4, "_dkv", keys_stay=True)),  # scores, dV, dP, dK
    (r"splash_\w*dq", _splash(3, "_dq")),  # scores, dP, dQ
)
