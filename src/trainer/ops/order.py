"""Orders of a row's tokens that balance the work of causal attention if rows are split over devices.

A token attends to earlier tokens, so the devices with the last tokens of a row would have most of the work. Two orders
balance the work. In both, the reordered row is split into n contiguous parts, one for each device:

    dual_chunk_swap: a row is split into 2n chunks. Device i has an early chunk, i, and a late chunk, 2n - 1 - i.
    striped: device i has the tokens i, i + n, i + 2n, ...  This also balances rows of packed documents.

Positions and segments move with their tokens, so no other code depends on the order. Rows are reordered with NumPy, on
the host.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

DUAL_CHUNK_SWAP, STRIPED = "dual_chunk_swap", "striped"


def order(length: int, n: int, strategy: str = DUAL_CHUNK_SWAP) -> np.ndarray:
    """Returns the original index of the token at each new index, int64 [length], for rows split over `n` devices.

    Raises:
      ValueError: the length is not a multiple of 2n (`dual_chunk_swap`) or n (`striped`).
    """
    chunks = {DUAL_CHUNK_SWAP: 2 * n, STRIPED: n}[strategy]
    if length % chunks:
        raise ValueError(f"{strategy} over {n} devices: {chunks} does not divide {length} tokens")
    tokens = np.arange(length)
    if strategy == STRIPED:
        return tokens.reshape(-1, n).T.ravel()
    early, late = np.split(tokens.reshape(chunks, -1), 2)
    return np.stack([early, late[::-1]], axis=1).ravel()


def reorder(batch: Mapping[str, Any], n: int, strategy: str = DUAL_CHUNK_SWAP) -> dict[str, Any]:
    """Returns `batch` with its tokens reordered by `order`, along axis 1 of each array with two or more axes."""
    return {name: x[:, order(x.shape[1], n, strategy)] if x.ndim > 1 else x for name, x in batch.items()}


def restored(batch: Mapping[str, Any], n: int, strategy: str = DUAL_CHUNK_SWAP) -> dict[str, Any]:
    """Inverts `reorder`."""
    return {name: in_true_order(x, n, strategy) if x.ndim > 1 else x for name, x in batch.items()}


def in_true_order(x: Any, n: int, strategy: str = DUAL_CHUNK_SWAP) -> Any:
    """Returns a NumPy or JAX array `x` [b, t, ...], which was reordered by `order`, with its tokens in their original
    order."""
    rows, length, rest = x.shape[0], x.shape[1], x.shape[2:]
    if strategy == STRIPED:
        return x.reshape(rows, n, length // n, *rest).swapaxes(1, 2).reshape(x.shape)
    pairs = x.reshape(rows, n, 2, length // (2 * n), *rest)
    chunks = [pairs[:, i, 0] for i in range(n)] + [pairs[:, i, 1] for i in reversed(range(n))]
    return (np if isinstance(x, np.ndarray) else jnp).concatenate(chunks, axis=1)
