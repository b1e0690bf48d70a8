"""The arguments of every block of a stack other than its input and its cache."""

from typing import NamedTuple

import jax


class Context(NamedTuple):
    """The argument `context` of `block(x, cache, context)`. Blocks read its fields by name: more may be added."""

    positions: jax.Array  # int [b, t], within the segment
    segments: jax.Array  # int [b, t]; 0 is padding
    rows: jax.Array  # int [b], each row's index in the global batch
    key: jax.Array | None  # for dropout, the layer's own; None: nothing is dropped
    sampled: jax.Array | None = None  # bool []: whether rules read sown values now (optim.any_due); None: they do

    def at(self, index: int | jax.Array) -> "Context":
        """The context with the key of a layer, or of a dropout site within one: the key folded with `index`."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, index))
