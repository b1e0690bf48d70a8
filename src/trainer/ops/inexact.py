"""Selects the leaves of a pytree that have gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def inexact(tree: Any) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the floating-point leaves of `tree`, and a function `join`.

    `join(leaves)` returns `tree` with its floating-point leaves replaced by `leaves`; `join(leaves, None)` also
    replaces all other leaves by None.
    """

    def floating(leaf: Any) -> bool:
        return jnp.issubdtype(leaf.dtype, jnp.inexact)

    def join(leaves: Sequence[Any], *other: None) -> Any:
        given = iter(leaves)
        return jax.tree.map(lambda leaf: next(given) if floating(leaf) else (leaf, *other)[-1], tree)

    return [leaf for leaf in jax.tree.leaves(tree) if floating(leaf)], join
