"""The table of shardings of a train state, as text and as plain data."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.ops.paths import Path
from trainer.sharding import axes_of, leading

Row = dict[str, Any]
COLUMNS = ("name", "axes", "spec", "shape", "per_device_shape", "bytes_per_device", "replicated")
# For each part of a train state: the name under which the totals count it.
KINDS = {
    "params": "parameters",
    "opt_state": "optimizer",
    "outer_opt_state": "optimizer",
    "rest": "other",
    "step": "other",
    "in_flight": "other",
    "frozen": "frozen",  # arrays that the objective reads in addition to the train state
}
_ISLANDS = "inner_state"  # the train states of DiLoCo's islands


def rows(tensors: Any, abstract: Any, shardings: Any) -> list[Row]:
    """Returns a row for each leaf of a train state, in the order of KINDS. The arguments are three trees with equal
    structure: the result of `state.shardings.tensors`, the abstract train state, and its shardings.

    `replicated` is the redundant fraction of the bytes on all devices: 0 for an array that is sharded over every mesh
    axis, 1 - 1/n for an array that is replicated on n devices.
    """
    leaves = zip(*map(jax.tree.leaves, (tensors, abstract, shardings)), strict=True)
    ordered = sorted(leaves, key=lambda row: (row[0].path[0] == _ISLANDS, list(KINDS).index(_part(row[0].path))))
    return [_row(tensor.name, tensor.axes, leaf.shape, leaf.dtype, sharding) for tensor, leaf, sharding in ordered]


def kind(path: Path) -> str:
    """Returns the kind of the leaf at `path` of a canonical train state: parameters, optimizer or other."""
    return KINDS[_part(path)]


def gradient_rows(tensors: Any, abstract: Any, shardings: Any, trained: Collection[str], dtype: str) -> list[Row]:
    """Returns a row for the gradient of each parameter whose name is in `trained`.

    A gradient has the dtype `dtype` and the parameter's storage sharding; under DiLoCo, the storage sharding
    of the islands' parameter.
    """
    leaves = list(zip(*map(jax.tree.leaves, (tensors, abstract, shardings)), strict=True))
    root = (_ISLANDS, "params") if any(tensor.path[0] == _ISLANDS for tensor, *_ in leaves) else ("params",)
    of_parameters = [(row[0].path[len(root) :], *row) for row in leaves if row[0].path[: len(root)] == root]
    return [
        _row(f"gradients/{'/'.join(path)}", tensor.axes, leaf.shape, jnp.dtype(dtype), sharding)
        for path, tensor, leaf, sharding in of_parameters
        if "/".join(path) in trained
    ]


def totals(found: Iterable[Row]) -> dict[str, int]:
    """Returns, as plain integers, the number of parameters, and the bytes of each kind of tensor, per device and
    in total."""
    found = list(found)
    result = {"parameters": sum(math.prod(row["shape"]) for row in found if row["name"].startswith("params/"))}
    for name in (*dict.fromkeys(KINDS.values()), "gradients"):
        of_kind = [row for row in found if KINDS.get(_part(row["name"].split("/")), "gradients") == name]
        result[f"{name}_bytes"] = sum(row["bytes"] for row in of_kind)
        result[f"{name}_bytes_per_device"] = sum(row["bytes_per_device"] for row in of_kind)
    return result


def disagreements(found: Iterable[Row]) -> list[str]:
    """Returns a sentence for each parameter named bias that is not sharded like the outputs of its kernel.

    A bias is added to the outputs of its kernel. If a mesh axis shards only the outputs or only the bias, each step
    moves the other one between devices, or, if the axis also shards the batch, the bias is replicated needlessly.
    """
    rows = {row["name"]: row for row in found if row["name"].startswith("params/")}
    sentences = []
    for name, bias in rows.items():
        layer, _, last = name.rpartition("/")
        kernel = rows.get(f"{layer}/kernel")
        if last != "bias" or kernel is None:
            continue
        outputs = len(bias["shape"]) - leading(bias["axes"])
        if outputs and kernel["spec"][-outputs:] != bias["spec"][-outputs:]:
            sentences.append(
                f"{layer}: kernel and bias disagree: the kernel's outputs {_named(kernel, outputs)} are sharded by "
                f"{_cell(kernel['spec'][-outputs:])}, the bias {_named(bias, outputs)} by "
                f"{_cell(bias['spec'][-outputs:])}; give the bias the axis names of the outputs"
            )
    return sentences


def text(found: Sequence[Row], sums: Mapping[str, int], warnings: Sequence[str] = ()) -> str:
    """Returns the table as text, followed by the totals and `warnings`."""
    return "\n".join(
        [*aligned([COLUMNS, *cells(found)]), "", *total_lines(sums), *(f"warning: {warning}" for warning in warnings)]
    )


def cells(found: Sequence[Row]) -> list[list[str]]:
    """Returns the rows as text, in the order of COLUMNS."""
    return [[_cell(row[column]) for column in COLUMNS] for row in found]


def total_lines(sums: Mapping[str, int]) -> list[str]:
    """Returns the totals as lines of text."""
    kinds = [key.removesuffix("_bytes") for key in sums if key.endswith("_bytes") and sums[key]]
    return [
        f"{sums['parameters']:,} parameters",
        *(
            f"{kind}: {sums[f'{kind}_bytes_per_device']:,} of {sums[f'{kind}_bytes']:,} bytes a device"
            for kind in kinds
        ),
    ]


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Returns each row of cells as a line of text. Columns are as wide as their widest cells; numbers are aligned to
    the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def cell(word: str, width: int) -> str:
        return word.rjust(width) if word[:1].isdigit() else word.ljust(width)

    return ["  ".join(map(cell, line, widths)).rstrip() for line in lines]


def _part(path: Sequence[str]) -> str:
    """Returns the part of a train state, or of an island's train state, that contains `path`."""
    return path[1] if path[0] == _ISLANDS else path[0]


def _row(name: str, axes: Sequence[str | None], shape: tuple[int, ...], dtype: Any, sharding: Any) -> Row:
    part, itemsize = sharding.shard_shape(shape), dtype.itemsize
    size, here, devices = math.prod(shape) * itemsize, math.prod(part) * itemsize, sharding.mesh.size
    return {
        "name": name,
        "axes": list(axes),
        "spec": [[axis for axis in axes_of(entry) if sharding.mesh.shape[axis] > 1] for entry in sharding.spec],
        "dtype": str(dtype),
        "shape": list(shape),
        "per_device_shape": list(part),
        "bytes": size,
        "bytes_per_device": here,
        "replicated": 1 - size / (here * devices) if here else 0.0,
    }


def _named(row: Row, last: int) -> str:
    return _cell(row["axes"][-last:])


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join('-' if item in (None, []) else _entry(item) for item in value)}]"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _entry(item: Any) -> str:
    return "+".join(item) if isinstance(item, list) else str(item)
