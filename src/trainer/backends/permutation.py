"""A permutation of leaves between two pytrees that have the same paths, except for renaming."""

from collections.abc import Callable
from typing import Any

import jax

from trainer.ops.paths import Path, path_of


class Permutation:
    """Moves leaves between a native tree and a canonical tree. Leaves are matched by path, never by position.

    Both directions only reorder: no cast, no copy, no arithmetic. Leaves may be anything: arrays, abstract arrays,
    PartitionSpecs, NamedShardings, None, pytrees. The permutation applies to all trees with the same containers as
    the two trees for which it was made.
    """

    def __init__(self, native: Any, canonical: Any, rename: Callable[[Path], Path] = lambda path: path):
        """`rename` maps a path in `native` to the path of the same leaf in `canonical`.

        Raises:
          ValueError: the renamed paths differ from those of `canonical`, or a path occurs twice; the message lists the
            paths that are in only one tree.
        """
        self._native: Any  # a PyTreeDef; its stubs lack flatten_up_to
        self._canonical: Any
        native_leaves, self._native = jax.tree_util.tree_flatten_with_path(native)
        canonical_leaves, self._canonical = jax.tree_util.tree_flatten_with_path(canonical)
        natives = {rename(path_of(path)): i for i, (path, _) in enumerate(native_leaves)}
        canonicals = {path_of(path): i for i, (path, _) in enumerate(canonical_leaves)}
        if natives.keys() != canonicals.keys() or len(natives) != len(native_leaves):
            odd = sorted("/".join(path) for path in natives.keys() ^ canonicals.keys())
            raise ValueError(f"native and canonical state differ in: {', '.join(odd) or 'paths that occur twice'}")
        self._to_canonical = [natives[path] for path in canonicals]
        self._to_native = [canonicals[path] for path in natives]

    def unpack(self, native: Any) -> Any:
        """Returns the canonical tree with the leaves of `native`."""
        leaves = self._native.flatten_up_to(native)
        return self._canonical.unflatten([leaves[i] for i in self._to_canonical])

    def pack(self, canonical: Any) -> Any:
        """Returns the native tree with the leaves of `canonical`."""
        leaves = self._canonical.flatten_up_to(canonical)
        return self._native.unflatten([leaves[i] for i in self._to_native])
