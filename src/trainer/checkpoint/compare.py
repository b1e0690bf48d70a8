"""Whether a checkpoint holds what a run wants, told by names, shapes and dtypes before any array is read."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.backends.codec import path_of
from trainer.config import UserError


def check_structure(path: Path, found: Any, wanted: Any) -> None:
    """Compares the leaves of two trees: what the checkpoint at `path` has, and what the run's state needs.

    Raises:
      UserError: names the first leaf that differs, its shape and dtype there and here, and how many do.
    """
    there, here = _leaves(found), _leaves(wanted)
    differing = [name for name in dict.fromkeys([*here, *there]) if there.get(name) != here.get(name)]
    if not differing:
        return
    first = differing[0]
    more = f", and {len(differing) - 1} more differ" if len(differing) > 1 else ""
    raise UserError(
        f"checkpoint {path} is of another {'optimizer' if first.startswith('opt_state') else 'model'}: {first} is "
        f"{there.get(first, 'absent')} there and {here.get(first, 'absent')} in this run{more}; "
        "give the configuration that it was saved under"
    )


def _leaves(tree: Any) -> dict[str, str]:
    return {
        "/".join(path_of(path)): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if hasattr(leaf, "shape")
    }
