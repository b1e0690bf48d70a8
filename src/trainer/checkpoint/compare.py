"""Checks that a checkpoint fits a run, by the names, shapes and dtypes of arrays, before any array is read or
written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from trainer.config.errors import UserError
from trainer.ops.paths import by_name

_UNSAVED = ("uint4", "uint2")  # dtypes that TensorStore, which Orbax uses for writing, does not support


def check_dtypes(tree: Any) -> None:
    """Refuses a train state that cannot be saved, before the run begins.

    Raises:
      UserError: an array has a dtype that cannot be stored in a checkpoint; the message names the first such array.
    """
    if odd := {name: leaf.dtype for name, leaf in by_name(tree).items() if str(leaf.dtype) in _UNSAVED}:
        name, dtype = next(iter(odd.items()))
        more = f", and {len(odd) - 1} more arrays are" if len(odd) > 1 else ""
        raise UserError(
            f"{name} is {dtype}{more}: Orbax cannot save this dtype; store another one, such as int4 or int8, or give "
            "enable_checkpointing=false"
        )


def check_structure(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Compares the leaves of the checkpoint at `path` with the leaves of the run's state, field by field.

    Returns the names of leaves that are bfloat16 in the checkpoint and float32 in the run's state. These leaves are
    accepted, because the conversion is exact.

    Raises:
      UserError: leaves differ; the message contains the name of the first differing leaf, its dtype and shape in both
        states, and the number of other differing leaves.
    """
    there, here = _leaves(found), _leaves(wanted)
    differing = [name for name in dict.fromkeys([*here, *there]) if there.get(name) != here.get(name)]
    wider = [name for name in differing if here.get(name) == there.get(name, "").replace("bfloat16", "float32")]
    if wider == differing:
        return wider
    first, *others = [name for name in differing if name not in wider]
    more = f", and {len(others)} more differ" if others else ""
    what, without = "model", ""
    if first.startswith("opt_state"):
        what, without = "optimizer", ", or continue with its parameters and a fresh optimizer: reset_optimizer=true"
    raise UserError(
        f"checkpoint {path} has another {what}: {first} is {there.get(first, 'absent')} there and "
        f"{here.get(first, 'absent')} in this run{more}; give the configuration that it was saved under{without}"
    )


def _leaves(parts: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"{part}/{name}".rstrip("/"): _described(leaf)
        for part, tree in parts.items()  # in the order of the state's fields: parameters first
        for name, leaf in by_name(tree, is_leaf=_is_empty).items()
        if hasattr(leaf, "shape") or _is_empty(leaf)
    }


def _is_empty(node: Any) -> bool:
    """Returns whether a node has no children, such as optax's EmptyState. Orbax saves and requires such nodes."""
    return node is None or (isinstance(node, tuple | list | Mapping) and not node)


def _described(leaf: Any) -> str:
    if _is_empty(leaf):
        return "empty"
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)  # random keys are stored on disk as integers
    return f"{leaf.dtype}{list(leaf.shape)}"
