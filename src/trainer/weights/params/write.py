"""Writes parameters in this trainer's format; see `trainer.weights.params.read` for the layout."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.leaves import orbax
from trainer.leaves.source import Leaf, progress
from trainer.weights.model_keys import model_yaml
from trainer.weights.params.read import CONFIG, REST, ROOT, TREE


def write_params(folder: Path, config: Config, leaves: Mapping[str, Leaf], dtype: str | None) -> None:
    """Writes `leaves`, one after the other, and config.yml into `folder`, which must exist and be empty.

    Args:
      config: the resolved configuration, which determines the RoPE pairing.
      dtype: the dtype to which floating-point values are cast; None keeps each stored dtype. Other values and
        buffers (`Leaf.buffer`) are never cast.

    Raises:
      UserError: the error of `target_dtypes`.
    """
    targets = target_dtypes(leaves, dtype)
    with orbax.writer(folder / TREE) as write, progress(leaves.values(), "writing") as tick:
        for name, leaf in leaves.items():
            # The value is not assigned to a variable, because a variable would keep it in memory while the next leaf is
            # read.
            write({f"{REST if leaf.buffer else ROOT}{name}": leaf.read(targets[name], tick)})
    (folder / CONFIG).write_text(model_yaml(config), encoding="utf-8")


def target_dtypes(leaves: Mapping[str, Leaf], dtype: str | None) -> dict[str, np.dtype]:
    """Returns the dtype in which each of `leaves` is written.

    Raises:
      UserError: `dtype` is None and layers of a leaf are stored in several dtypes; the message names all such leaves.
    """
    if not dtype and (mixed := [f"{name}: {', '.join(leaf.mixed)}" for name, leaf in leaves.items() if leaf.mixed]):
        head = "layers are stored in several dtypes; give dtype=float32, which loses nothing, or dtype=bfloat16:"
        raise UserError("\n  ".join([head, *mixed]))
    return {name: leaf.dtype if leaf.buffer else target_dtype(leaf.dtype, dtype) for name, leaf in leaves.items()}


def target_dtype(stored: np.dtype, dtype: str | None) -> np.dtype:
    """Returns the dtype in which values with the dtype `stored` are written."""
    import jax.numpy as jnp

    return np.dtype(dtype) if dtype and jnp.issubdtype(stored, jnp.floating) else stored
