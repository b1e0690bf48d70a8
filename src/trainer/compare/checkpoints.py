"""Compares two checkpoints leaf by leaf."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.checkpoint.manager import inspect, newest
from trainer.compare.difference import Difference, Tolerance, differences, forward_order
from trainer.compare.report import Comparison, Quantity, Report
from trainer.config.errors import UserError
from trainer.leaves import orbax
from trainer.models.families import in_stack
from trainer.runtime import storage
from trainer.runtime.folders import check_folder
from trainer.weights.params.read import CONFIG, TREE

Readers = Mapping[str, Callable[[], np.ndarray]]

# Labels for the first part of a leaf's path, in the order of the report.
_ISLANDS = "inner_state"  # the train states of DiLoCo's islands
_PARTS = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "outer_opt_state": "outer optimizer state",
    _ISLANDS: "islands",
    "rest": "other variables",
    "step": "step",
    "in_flight": "fragment in flight",
}


def compare_checkpoints(left: str, right: str, tolerance: Tolerance, say: Callable[[str], None]) -> Report:
    """Compares the names, shapes, dtypes and values of two checkpoints' leaves. At most two leaves are in host memory
    at a time.

    Args:
      left, right: a run's folder (its newest checkpoint is compared), one of its checkpoints/N, or the output of
        `trainer.export ... format=params`. Runs and checkpoints may be in a bucket. If one side contains only
        parameters, only parameters are compared.
      tolerance: applies to every leaf.
      say: receives progress messages.

    Raises:
      UserError: there is no checkpoint, or it is damaged.
    """
    trees = [_tree(left), _tree(right)]
    readers = [orbax.readers(tree) for tree in trees]
    parts = [{name.partition("/")[0] for name in reader} for reader in readers]
    # If one side contains only parameters, only parameters are compared.
    both = parts[0] & parts[1] if {"params"} in parts else parts[0] | parts[1]
    quantities = []
    for part, words in _PARTS.items():
        if part in both:
            say(words)
            quantities.append(Quantity(words, _differences(part, readers, tolerance)))
    head = [("left", str(trees[0])), ("right", str(trees[1]))]
    if alone := sorted(_PARTS[part] for part in (parts[0] | parts[1]) - both):
        head.append(("left out", f"{', '.join(alone)}: on one side only"))
    return Report("left", tolerance, head, [Comparison("right", quantities)])


def _tree(given: str) -> Any:
    """Returns the folder to compare: the Orbax tree if the user's folder `given` is an export, otherwise the folder of
    a checkpoint (see `newest`)."""
    folder = storage.folder(given)
    check_folder(folder, [CONFIG])
    if (folder / TREE).is_dir() and (folder / CONFIG).is_file():
        check_folder(folder, [TREE])
        return folder / TREE
    checkpoint = newest(folder)
    if checkpoint is None:
        state = "it contains no checkpoint" if folder.is_dir() else "there is no such folder"
        raise UserError(
            f"{given}: {state}; give a run's folder, one of its checkpoints/N, or the output of trainer.export "
            "format=params"
        )
    inspect(checkpoint)
    return checkpoint


def _differences(part: str, readers: Sequence[Readers], tolerance: Tolerance) -> list[Difference]:
    """Returns the differences of the leaves whose path begins with `part`. Reads one pair of leaves at a time."""
    apart: list[Difference] = []
    for name in dict.fromkeys(name for reader in readers for name in reader if name.partition("/")[0] == part):
        short = name.removeprefix(f"{part}/")
        left, right = ({short: reader[name]()} if name in reader else {} for reader in readers)
        # The first axis of the islands' arrays is not an axis of layers: it has one index per island.
        apart += differences(left, right, tolerance, _layers if part != _ISLANDS else lambda name: None)
    return sorted(apart, key=forward_order)


def _layers(name: str) -> Iterable[int] | None:
    """Returns the layer numbers of the stacked array `name`, which begin at 0 in each stack; None for an array that is
    not stacked."""
    return itertools.count() if in_stack(name) else None
