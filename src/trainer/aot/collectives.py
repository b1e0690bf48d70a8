"""The collectives of a step by kind, dtype, bytes and mesh axes. A collective in a loop counts once per iteration.

`bytes` counts the bytes that one device sends in a ring algorithm over n devices, for an array of s bytes (the larger
of operand and result):
  all-gather, reduce-scatter        s (n - 1) / n
  all-reduce                        2 s (n - 1) / n      a reduce-scatter, then an all-gather
  all-to-all                        s (n - 1) / n
  collective-permute, -broadcast    s
Chan et al. 2007, Collective communication: theory, practice, and experience; Patarasuk and Yuan 2009.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from trainer.aot import loops
from trainer.aot.hlo import Computation, Instruction, Module
from trainer.sharding import slice_of

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
SUMS = ("all-reduce", "reduce-scatter")
# The partitioner's name for the body of a loop that computes matrix products and reduce-scatters their sum, by permutes
# around a ring. If the loop all-gathers an operand instead, the name ends in _ag (openxla/xla,
# xla/service/spmd/dot_handler.cc).
_SUMMING_RING = re.compile(r"(?:wide\.)*windowed_dot_general_body_rs(\.|$)")
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(mesh\[[^\]]*\](?:, device_ids=\(\[[\d,]+\](?:T\([\d,]+\))?\))? \{[^}]*\}"
    r"|\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
_SIZES = re.compile(r"'[^']+'=(\d+)")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclass(frozen=True)
class Collective:
    """All collectives of a step with the same kind, dtype, axes and size.

    Attributes:
      kind: one of KINDS.
      sums: whether it sums arrays over devices: a kind in SUMS, or a permute of partial sums around a ring.
      dtype: the dtype of its elements, in HLO's spelling ("bf16").
      axes: the mesh axes that it spans, outermost first; () without a mesh.
      devices: the number of devices in a group.
      slices: the number of slices that a group spans; if above 1, the group communicates over the data center network.
      size: bytes of the array on one device, the larger of operand and result.
      count: executions per step.
      bytes: bytes sent by one device per step, over all executions.
      sources: up to three of the traced operations that it comes from.
      conditional: whether it is in a branch of a conditional, and thus may not run in every step.
    """

    kind: str
    sums: bool
    dtype: str
    axes: tuple[str, ...]
    devices: int
    slices: int
    size: int
    count: int
    bytes: float
    sources: tuple[str, ...]
    conditional: bool = False


def collectives(module: Module, mesh: Any = None) -> tuple[tuple[Collective, ...], list[str]]:
    """Returns the collectives of `module`, most bytes first, and the names of the loops with collectives and an unknown
    trip count, which count as one iteration.

    In one computation, collectives with the same operands and groups count once: the partitioner emits an all-gather
    for each use, and the compiler merges them later.

    Args:
      module: the module after partitioning.
      mesh: a `jax.sharding.Mesh`, an ordered mapping from axis to size, or None.
    """
    layout = layout_of(mesh)
    merged: dict[Collective, list[tuple[int, tuple[str, ...]]]] = {}
    unknown: list[str] = []
    for one, times in _found(module, layout, module.entry, 1, False, unknown):
        if one.devices > 1:
            merged.setdefault(replace(one, sources=()), []).append((times, one.sources))
    transfers = [
        replace(
            one,
            count=sum(times for times, _ in runs),
            bytes=sum(times for times, _ in runs) * one.bytes,
            sources=tuple(dict.fromkeys(source for _, sources in runs for source in sources))[:3],
        )
        for one, runs in merged.items()
    ]
    return tuple(sorted(transfers, key=lambda c: -c.bytes)), unknown


class Layout(NamedTuple):
    """The axes of a mesh, their sizes, and the slice of each device. `slices` is empty if the mesh has no devices."""

    names: list[str]
    sizes: list[int]
    slices: list[int]


def layout_of(mesh: Any) -> Layout:
    """Returns the layout of a `jax.sharding.Mesh`, of an ordered mapping from axis to size, or of None."""
    shape: Mapping[str, int] = {} if mesh is None else getattr(mesh, "shape", mesh)
    devices = getattr(mesh, "devices", None)
    slices = [] if devices is None else [slice_of(device) or 0 for device in devices.flat]
    return Layout(list(shape), list(shape.values()), slices)


def executed(
    layout: Layout, computation: Computation, instruction: Instruction, conditional: bool = False
) -> list[Collective]:
    """Returns a `Collective` for each array that one execution of a collective instruction transfers. Its attribute
    `devices` is 1 if no data moves between devices."""
    names, sizes, slices = layout
    kind = instruction.opcode.removesuffix("-start")
    sums = kind in SUMS or (kind == "collective-permute" and _SUMMING_RING.match(computation.name) is not None)
    groups = replica_groups(instruction, math.prod(sizes))
    axes = _varying(groups, names, sizes) if names else ()
    devices = max((len(group) for group in groups), default=1)
    spread = max((len({slices[i] for i in group}) for group in groups), default=1) if slices else 1
    if kind == "collective-permute":
        devices = math.prod(sizes[names.index(axis)] for axis in axes) if names else len(groups)
    sources = (instruction.op_name,) if instruction.op_name else ()
    return [
        Collective(kind, sums, dtype, axes, devices, spread, size, 1, moved(kind, size, devices), sources, conditional)
        for dtype, size in _parts(computation, instruction)
    ]


def moved(kind: str, size: int, devices: int) -> float:
    """Returns the bytes that a device sends in one collective on an array of `size` bytes over a ring of `devices`."""
    if kind in ("collective-permute", "collective-broadcast"):
        return float(size)
    return (2.0 if kind == "all-reduce" else 1.0) * size * (devices - 1) / devices


def _found(
    module: Module, layout: Layout, name: str, times: int, conditional: bool, unknown: list[str]
) -> Iterator[tuple[Collective, int]]:
    """Yields (collective, number of executions) for each collective of a computation and of the computations that it
    calls. `conditional`: whether the computation is in a branch of a conditional."""
    computation = module.computations[name]
    seen = set()
    for instruction in computation:
        if instruction.opcode.removesuffix("-start") in KINDS:
            key = (instruction.opcode, instruction.operands, _groups_text(instruction))
            if key not in seen:
                seen.add(key)
                yield from ((one, times) for one in executed(layout, computation, instruction, conditional))
        elif instruction.opcode == "while":
            trips = loops.trips(module, computation, instruction)
            repeated = times * (1 if trips is None else trips)
            inside = [
                found
                for called in instruction.called
                for found in _found(module, layout, called, repeated, conditional, unknown)
            ]
            if trips is None and inside:
                unknown.append(instruction.op_name or instruction.name)
            yield from inside
        elif instruction.opcode in ("call", "fusion", "fusion-start", "async-start"):
            yield from _found(module, layout, instruction.called[0], times, conditional, unknown)
        elif instruction.opcode == "conditional":
            branches = [list(_found(module, layout, called, times, True, unknown)) for called in instruction.called]
            yield from max(branches, key=lambda branch: sum(one.size * runs for one, runs in branch))


def _parts(computation: Computation, instruction: Instruction) -> list[tuple[str, int]]:
    """Returns a pair (dtype, bytes) for each array that a collective transfers. A collective may have several
    operands."""
    operands = [shape for operand in computation.operands(instruction) for shape in operand.shapes]
    if instruction.opcode.startswith("ragged"):
        operands = operands[:1]
    results = instruction.shapes
    if instruction.opcode.endswith("-start") and len(results) > len(
        operands
    ):  # a tuple of the operands and the results
        results = results[len(operands) : 2 * len(operands)]
    if instruction.opcode.startswith("all-to-all") and len(operands) > 1:
        return [(operands[0].dtype, sum(shape.bytes for shape in operands))]
    parts = zip(operands, results, strict=False)
    return [(operand.dtype, max(operand.bytes, result.bytes)) for operand, result in parts]


def replica_groups(instruction: Instruction, devices: int) -> list[list[int]]:
    """Returns the device groups of a collective, or the (source, target) pairs of a permute.

    Parses each of HLO's forms: lists `{{0,1},{2,3}}`, iota `[2,2]<=[4]T(1,0)`, and axes of a mesh
    `mesh['a'=2,'b'=2] {'a'}`. Device numbers are indices into the flattened mesh.
    """
    text = _groups_text(instruction)
    if text == "{}":
        return [list(range(devices))]
    if text.startswith("{{"):
        return [_ints(group) for group in re.findall(r"\{([\d,]+)\}", text)]
    if text.startswith("["):
        shape, *rest = _IOTA.fullmatch(text).groups()  # type: ignore[union-attr]
        return _iota(*rest).reshape(_ints(shape)).tolist()
    axes, order, transposed, chosen = _MESH.match(text).groups()  # type: ignore[union-attr]
    return _mesh_groups(axes, order, transposed, chosen)


def _groups_text(instruction: Instruction) -> str:
    match = _GROUPS.search(instruction.text)
    return match[1] if match else "{}"


def _mesh_groups(axes: str, order: str | None, transposed: str | None, chosen: str) -> list[list[int]]:
    """Returns the device groups of a text such as `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}`.

    The braces have the axes and sub-axes along which the devices of a group differ. The sub-axis `'b':(m)n` of an axis
    of size s is the middle axis after a reshape to [m, n, s / (m n)].
    """
    names = re.findall(r"'([^']+)'=", axes)
    sizes = [int(size) for size in _SIZES.findall(axes)]
    ids = np.arange(math.prod(sizes))
    if order is not None:
        ids = _iota(order, transposed)
    split: list[int] = []
    picked: list[int] = []
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)
    for name, size in zip(names, sizes, strict=True):
        cuts = sorted((int(before), int(width)) for axis, before, width in parts if axis == name and before)
        if not cuts:
            picked += [len(split)] if any(axis == name for axis, *_ in parts) else []
            split.append(size)
            continue
        done = 1
        for before, width in cuts:
            split += [before // done, width]
            picked.append(len(split) - 1)
            done = before * width
        split.append(size // done)
    grid = ids.reshape(split)
    kept = [axis for axis in range(len(split)) if axis not in picked]
    return grid.transpose(kept + picked).reshape(-1, math.prod(split[axis] for axis in picked)).tolist()


def _iota(dims: str, transposed: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return (ids.transpose(_ints(transposed)) if transposed else ids).reshape(-1)


def _ints(text: str) -> list[int]:
    return [int(digits) for digits in text.split(",")]


def _varying(groups: Sequence[Sequence[int]], names: list[str], sizes: list[int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group differ."""
    varying: set[int] = set()
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.asarray(group), sizes))
        varying |= set(np.flatnonzero((coordinates != coordinates[:, :1]).any(axis=1)))
    return tuple(name for axis, name in enumerate(names) if axis in varying)
