"""A cache of prefilled prompts, which later prompts may reuse as prefixes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.inference.state import Prefix


@jax.jit
def _copied(prefix: Prefix) -> Prefix:
    """Copies all arrays in one program."""
    return jax.tree.map(jnp.copy, prefix)


class PrefixCache:
    """Keeps the most recently used prefixes, up to `limit` bytes per process.

    `places(cache)` returns the number of positions in each array of `cache` (`Engine.places`).
    """

    def __init__(self, limit: int, places: Callable[[Any], Sequence[int]]):
        self._limit, self._size, self._places = limit, 0, places
        self._found: OrderedDict[tuple[Hashable, bytes], tuple[np.ndarray, Prefix, int]] = OrderedDict()

    @property
    def size(self) -> int:
        """The total size of the cached arrays in bytes."""
        return self._size

    def get(self, tokens: np.ndarray, of: Hashable = (0, "")) -> tuple[Prefix | None, int]:
        """Returns the cached prefix that shares the most leading tokens with `tokens`, and the number of shared tokens;
        (None, 0) if no prefix can be used.

        The prefix is a copy, so it may be donated. The last of `tokens` never counts as shared: it must run through the
        model, because its hidden state determines the next token.

        The prefix may have cache entries of tokens after the shared ones. Later writes replace these entries before any
        token attends to them. In a ring cache, however, these entries may have replaced those of shared tokens, so a
        prefix longer than the ring is used only if all its tokens are shared. Recurrent state, which has no position
        axis, counts as a ring of length 0.

        `of`: the adapter and the owner of the request. Only prefixes that were stored with an equal `of` are used.
        """
        best, shared = None, 0
        for key, (known, prefix, _) in self._found.items():
            size = min(known.size, tokens.size - 1)
            different = np.flatnonzero(known[:size] != tokens[:size])
            same = int(different[0]) if different.size else size
            capacity = min(self._places(prefix.cache))
            if key[0] == of and same > shared and (same == known.size or known.size <= capacity):
                best, shared = key, same
        if best is None:
            return None, 0
        self._found.move_to_end(best)
        prefix = _copied(self._found[best][1])
        return prefix._replace(sequences=prefix.sequences._replace(positions=np.full(1, shared, np.int32))), shared

    def put(self, tokens: np.ndarray, prefix: Prefix, of: Hashable = (0, "")) -> None:
        """Stores `prefix`, the result of prefilling `tokens`. If the cache exceeds its limit, drops the least recently
        used prefixes."""
        prefix = prefix._replace(sequences=prefix.sequences._replace(controls=None))
        key, size = (of, tokens.tobytes()), sum(array.nbytes for array in jax.tree.leaves(prefix))
        if key in self._found:
            self._found.move_to_end(key)
            return
        self._found[key] = tokens, prefix, size
        self._size += size
        while self._size > self._limit:
            self._size -= self._found.popitem(last=False)[1][2]
