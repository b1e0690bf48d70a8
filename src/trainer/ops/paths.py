"""Names for the leaves of a pytree."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

Path = tuple[str, ...]

OUTSIDE = "_outside_pipeline"  # name suffix of a stack that contains the layers outside of a pipeline


def whole_name(name: str) -> str:
    """Returns a parameter's name in checkpoints, where one stack contains the layers inside and outside of a pipeline.

    Patterns in the configuration are matched against this name.
    """
    return name.replace(f"{OUTSIDE}/", "/")


def listed(names: Iterable[str]) -> str:
    """Returns the distinct names that patterns can match (see `whole_name`), as text for a message."""
    return ", ".join(dict.fromkeys(map(whole_name, names)))


def path_of(keypath: tuple[Any, ...]) -> Path:
    """Returns the names of the keys in a JAX key path, for any kind of container."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in keypath)


def name_of(keypath: tuple[Any, ...]) -> str:
    """Returns the names of the keys in a JAX key path, joined: a/b/c."""
    return "/".join(path_of(keypath))


def by_path(tree: Any) -> dict[Path, Any]:
    """Returns the leaves of any pytree by path, in the order of the pytree."""
    return {path_of(keypath): leaf for keypath, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def by_name(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns the leaves of any pytree by name, in the order of the pytree."""
    return {name_of(keypath): leaf for keypath, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)}
