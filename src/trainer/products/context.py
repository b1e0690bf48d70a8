"""The argument `context` of every block of a stack and of every product in its layers."""

from typing import NamedTuple

import jax


class Context(NamedTuple):
    """The argument `context` of `block(x, cache, context)`. Blocks must read fields by name, as more may be added."""

    positions: jax.Array  # int [b, t], within the segment
    segments: jax.Array  # int [b, t]; 0 is padding
    rows: jax.Array  # int [b], each row's index in the global batch
    key: jax.Array | None  # this layer's dropout key; None: nothing is dropped
    sampled: jax.Array | None = None  # bool []: whether rules read sown values in this step (optim.any_due); None: yes

    # bool [b, t or 1, ranks]: the adapter ranks that each row or token uses; None: all. See `layers.adapted`.
    ranks: jax.Array | None = None
    # int [b, n], the lengths of each row's documents (`ops.documents`); None: rows may have any number of documents.
    documents: jax.Array | None = None

    def by_row(self) -> dict[str, jax.Array]:
        """Returns the fields that have an entry for each row."""
        names = ("positions", "segments", "rows", "ranks", "documents")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def at(self, index: int | jax.Array) -> "Context":
        """Returns the context of a layer, or of a dropout site within a layer: folds `index` into the dropout key."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, index))
