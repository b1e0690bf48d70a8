"""Orbax trees, read leaf by leaf."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from trainer.checkpoint.source import names_of, nested

T = TypeVar("T")


def headers(path: Path) -> dict[str, Any]:
    """Shape and dtype of every leaf of an Orbax tree, by its path with slashes."""
    from orbax.checkpoint import v1 as ocp

    def as_dict(node: Any) -> Any:
        if isinstance(node, list | tuple):
            node = dict(enumerate(node))
        return {str(key): as_dict(child) for key, child in node.items()} if isinstance(node, Mapping) else node

    flat = names_of(as_dict(ocp.metadata(path.absolute()).metadata))
    return {name: leaf for name, leaf in flat.items() if hasattr(leaf, "shape")}


def read(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """One leaf on the host."""
    return _load(path, name, np.broadcast_to(np.zeros((), dtype), shape))


def place(path: Path, name: str, abstract: jax.ShapeDtypeStruct) -> jax.Array:
    """One leaf in the dtype and sharding of `abstract`; every process reads what its devices hold."""
    return _load(path, name, abstract)


def _load(path: Path, name: str, abstract: Any) -> Any:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        return names_of(ocp.load(path.absolute(), nested({name: abstract})))[name]
