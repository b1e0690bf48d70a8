"""The memory of a compiled step: the temporaries that are live at its peak, with their sources."""

import math
import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from trainer.aot.dump import Dump
from trainer.aot.hlo import Instruction, Module, parse, shapes_of

GRADIENTS, SAVED = "gradients", "saved for the backward pass"
COPIES, OTHER = "copies of the state", "other temporaries"

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(?: color (\d+),)?(.*)")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")

# Arguments of the step that belong to its state have names with these prefixes: state['model'][...] in NNX, and
# state.params[...] in Linen's TrainState.
STATE = ("state[", "state.")

Key = tuple[str, str]  # identifies a value: the instruction that produces it, and its index in the result tuple


class Buffer(NamedTuple):
    """An array in the device's main memory.

    Attributes:
      name: the name of the instruction that produces it.
      size: bytes, including the padding of its layout.
      shape: in HLO's spelling, such as f32[32,256,4096].
      kind: GRADIENTS, SAVED, COPIES or OTHER.
      op_name: the traced operation; "" if the compiler added the instruction.
      source: file:line of the traced operation, or "".
    """

    name: str
    size: int
    shape: str
    kind: str
    op_name: str
    source: str


class Leaf(NamedTuple):
    """An array of the train state: local shape (on one device), global shape, and bytes on one device."""

    dims: tuple[int, ...]
    global_dims: tuple[int, ...]
    bytes: int


def temporaries(dump: Dump, parameters: Collection[tuple[int, ...]] = ()) -> tuple[Buffer, ...]:
    """Returns the temporaries that are live at their peak, the largest first.

    If several buffers share an address at the peak, only the largest of them is listed. The instruction that produces a
    buffer determines its kind. A buffer of the backward pass with the shape of a parameter is a gradient. A buffer of
    the forward pass that is live during the backward pass was saved for the backward pass. If the instruction's op_name
    is an array of the step's argument `state`, the buffer is a copy of that array in another dtype or layout.

    Args:
      dump: the dump of the compilation; if it has no buffer assignment, the result is ().
      parameters: the shapes of the parameters on one device, and their global shapes, which gradients have before they
        are reduced.
    """
    if not (dump.assignment and dump.live_range and dump.optimized):
        return ()
    values = _temporary_values(dump.assignment)
    ranges = {(name, index): (int(first), int(last)) for name, index, first, last in _ranges(dump.live_range)}
    moment = _peak(values, ranges)
    module = parse(dump.optimized)
    origins = _Origins(module)
    by_offset: dict[int, tuple[int, str, str]] = {}
    for (name, index), (size, offset, shape) in values.items():
        first, last = ranges.get((name, index), (0, -1))
        if first <= moment <= last and size > by_offset.get(offset, (0, "", ""))[0]:
            by_offset[offset] = (size, name, shape)
    shapes = {tuple(sorted(dims)) for dims in parameters}
    buffers = [_buffer(origins, size, name, shape, shapes) for size, name, shape in by_offset.values()]
    if "transpose(" not in origins.op_name(_running(dump.live_range, moment)):
        buffers = [buffer._replace(kind=OTHER) if buffer.kind == SAVED else buffer for buffer in buffers]
    return tuple(sorted(buffers, key=lambda buffer: -buffer.size))


def by_kind(buffers: Iterable[Buffer]) -> dict[str, int]:
    """Returns the bytes of each kind of temporary."""
    sums = dict.fromkeys((GRADIENTS, SAVED, COPIES, OTHER), 0)
    for buffer in buffers:
        sums[buffer.kind] += buffer.size
    return sums


def leaves(tree: Any) -> list[Leaf]:
    """Returns a `Leaf` for each array of a tree of abstract arrays with shardings.

    Arrays that are offloaded to host memory are left out.
    """
    import jax

    described = []
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding.memory_kind in (None, "device", "unpinned_host"):
            dims = leaf.sharding.shard_shape(leaf.shape)
            described.append(Leaf(tuple(dims), tuple(leaf.shape), math.prod(dims) * leaf.dtype.itemsize))
    return described


def _temporary_values(assignment: str) -> dict[Key, tuple[int, int, str]]:
    """Returns a dict from `Key` to (size, offset, shape) for the values in main memory's temporary allocation."""
    values: dict[Key, tuple[int, int, str]] = {}
    inside = False
    for line in assignment.splitlines():
        if header := _ALLOCATION.match(line):
            inside = "preallocated-temp" in header[3] and header[2] in (None, "0")
        elif inside and (value := _VALUE.match(line)):
            name, index, size, offset, shape = value.groups()
            values[name, index or "{}"] = (int(size), int(offset), shape)
    return values


def _ranges(live_range: str) -> list[tuple[str, str, str, str]]:
    return [match.groups() for line in live_range.splitlines() if (match := _RANGE.match(line))]  # type: ignore[misc]


def _peak(values: dict[tuple[str, str], tuple[int, int, str]], ranges: dict[tuple[str, str], tuple[int, int]]) -> int:
    """Returns the time in the schedule at which live values take the most memory.

    Of the live values at one offset, only the largest counts.
    """
    events: dict[int, list[tuple[int, int, int]]] = {}
    for key, (size, offset, _) in values.items():
        if key in ranges:
            first, last = ranges[key]
            events.setdefault(first, []).append((1, size, offset))
            events.setdefault(last + 1, []).append((-1, size, offset))
    live: dict[tuple[int, int], int] = {}
    most, peak = -1, 0
    for moment in sorted(events):
        for change, size, offset in events[moment]:
            live[offset, size] = live.get((offset, size), 0) + change
        sizes: dict[int, int] = {}
        for (offset, size), count in live.items():
            if count > 0:
                sizes[offset] = max(sizes.get(offset, 0), size)
        if sum(sizes.values()) > most:
            most, peak = sum(sizes.values()), moment
        live = {key: count for key, count in live.items() if count}
    return peak


def _running(live_range: str, moment: int) -> str:
    """Returns the instruction that runs at a time of the schedule."""
    match = re.search(rf"^    {moment}:(\S+)$", live_range, re.MULTILINE)
    return match[1] if match else ""


class _Origins:
    """The traced operations behind the instructions of a module."""

    def __init__(self, module: Module):
        self.module = module
        self.instructions = {i.name: i for computation in module.computations.values() for i in computation}
        self.parent = {i.name: computation.name for computation in module.computations.values() for i in computation}
        self.callers = {called: i for i in self.instructions.values() for called in i.called}

    def named(self, name: str) -> Instruction | None:
        """Returns the instruction `name` or, if it has no op_name, the nearest instruction with one.

        The search follows first operands and, from an instruction without operands, the caller, such as a loop.
        """
        instruction = self.instructions.get(name)
        for _ in range(16):
            if instruction is None or instruction.op_name:
                break
            caller = self.callers.get(self.parent[instruction.name])
            instruction = self.instructions[instruction.operands[0]] if instruction.operands else caller
        return instruction

    def op_name(self, name: str) -> str:
        """Returns the traced operation behind an instruction, or ""."""
        instruction = self.named(name)
        return instruction.op_name if instruction else ""


def _buffer(origins: _Origins, size: int, name: str, shape: str, parameters: set[tuple[int, ...]]) -> Buffer:
    instruction = origins.named(name)
    op_name = instruction.op_name if instruction else ""
    arrays = shapes_of(shape)
    dims = tuple(sorted(arrays[0].dims)) if arrays else ()
    if "transpose(" in op_name and len(dims) > 1 and dims in parameters:
        kind = GRADIENTS
    elif op_name.startswith(STATE):
        kind = COPIES
    else:
        kind = SAVED if "jvp(" in op_name and "transpose(" not in op_name else OTHER
    short = f"{arrays[0].dtype}[{','.join(map(str, arrays[0].dims))}]" if arrays else shape
    return Buffer(name, size, short, kind, op_name, origins.module.source(instruction) if instruction else "")
