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
    """Returns a copy of all arrays, made by one program."""
    return jax.tree.map(jnp.copy, prefix)


class PrefixCache:
    """The most recently used prefixes of prompts, within `limit` bytes per process. `places`: see `Engine.places`."""

    def __init__(self, limit: int, places: Callable[[Any], Sequence[int]]):
        self._limit, self._size, self._places = limit, 0, places
        self._found: OrderedDict[tuple[Hashable, bytes], tuple[np.ndarray, Prefix, int]] = OrderedDict()

    @property
    def size(self) -> int:
        """The bytes of all arrays."""
        return self._size

    def get(self, tokens: np.ndarray, of: Hashable = (0, "")) -> tuple[Prefix | None, int]:
        """Returns a prefix that begins like `tokens` and may be donated, and their common length; else (None, 0).

        At least one token remains to run, because its hidden state determines the next token. Cache entries after the
        common tokens are overwritten before they are attended to. In a ring cache, they have already overwritten
        earlier entries, so a prefix longer than the ring is used only if all of it is common. The same holds for state
        without a position axis. Only prefixes with an equal `of`, that is, adapter and owner, are used.
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
        """Stores `prefix`, the result of prefilling `tokens`, and drops the least recently used prefixes."""
        prefix = prefix._replace(sequences=prefix.sequences._replace(controls=None))
        key, size = (of, tokens.tobytes()), sum(array.nbytes for array in jax.tree.leaves(prefix))
        if key in self._found:
            self._found.move_to_end(key)
            return
        self._found[key] = tokens, prefix, size
        self._size += size
        while self._size > self._limit:
            self._size -= self._found.popitem(last=False)[1][2]
