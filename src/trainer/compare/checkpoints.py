"""Two checkpoints, leaf by leaf."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.checkpoint import inspect, newest, orbax
from trainer.checkpoint.params import CONFIG, TREE
from trainer.compare.difference import Difference, Tolerance, differences, forward_order
from trainer.compare.report import Comparison, Quantity, Report
from trainer.config import UserError
from trainer.models.families import BESIDE
from trainer.runtime import storage

Readers = Mapping[str, Callable[[], np.ndarray]]

# What the first component of a leaf's path says, in the order in which a person would look.
_PARTS = {"params": "parameters", "opt_state": "optimizer state", "rest": "other variables", "step": "step"}


def compare_checkpoints(left: str, right: str, tolerance: Tolerance, say: Callable[[str], None]) -> Report:
    """Compares names, shapes, dtypes and values. On the host there are never more than two leaves.

    Args:
      left, right: a run's folder, which stands for its newest checkpoint; one of its checkpoints/N; or what
        `trainer.export ... format=params` wrote. Runs and checkpoints may lie in a bucket. Where one of the two holds
        parameters alone, so much is compared.
      tolerance: for every leaf.
      say: told how it goes.

    Raises:
      UserError: there is no checkpoint, or it is damaged.
    """
    trees = [_tree(left), _tree(right)]
    readers = [orbax.readers(tree) for tree in trees]
    parts = [{name.partition("/")[0] for name in found} for found in readers]
    # Parameters alone are no checkpoint that lacks its optimizer.
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
    """The Orbax tree in a folder that somebody names: of a checkpoint, the folder itself."""
    folder = storage.folder(given)
    if (folder / TREE).is_dir() and (folder / CONFIG).is_file():
        return folder / TREE
    checkpoint = newest(folder)
    if checkpoint is None:
        state = "no checkpoint is there" if folder.is_dir() else "there is no such folder"
        raise UserError(
            f"{given}: {state}; give a run's folder, one of its checkpoints/N, or what trainer.export wrote with "
            "format=params"
        )
    inspect(checkpoint)
    return checkpoint


def _differences(part: str, readers: Sequence[Readers], tolerance: Tolerance) -> list[Difference]:
    """Of the leaves below `part`, two of which are read at a time."""
    apart: list[Difference] = []
    for name in dict.fromkeys(name for found in readers for name in found if name.partition("/")[0] == part):
        short = name.removeprefix(f"{part}/")
        left, right = ({short: found[name]()} if name in found else {} for found in readers)
        apart += differences(left, right, tolerance, _layers)
    return sorted(apart, key=forward_order)


def _layers(name: str) -> Iterable[int] | None:
    """The layers of an array of a stack, counted within the stack: a decoder holds stacks and what `BESIDE` names."""
    _, found, path = f"/{name}".partition("/decoder/")
    return itertools.count() if found and path.partition("/")[0] not in BESIDE else None
