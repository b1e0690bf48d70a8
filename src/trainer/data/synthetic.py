"""Rows that are computed from their index, for tests and benchmarks without a corpus."""

import numpy as np

from trainer.config.capabilities.documents import SYNTHETIC
from trainer.data.batches import Batch, make_batch
from trainer.data.order import mix

EVAL_ROWS = 256  # the number of evaluation rows
EVAL_OFFSET = 1 << 48  # the index of the first evaluation row; training never reaches so large an index
_CUTS = SYNTHETIC - 1  # the number of cuts in a row; n cuts make n + 1 segments, or fewer if cuts coincide
_STRIDE = 7  # the difference between consecutive tokens


class SyntheticRows:
    """Rows of `length` tokens. Each row is a pure function of (seed, offset + index).

    Up to four segments of unequal length share a row, and at most the last eighth of the row is padding. A segment
    begins at a multiple of `align` tokens with a random token, and continues with next = (token + 7) mod vocab_size, a
    rule that any model can learn. With `size` None, there are infinitely many rows. `together`: whether a row may have
    several segments.
    """

    def __init__(
        self,
        length: int,
        vocab_size: int,
        *,
        seed: int,
        offset: int = 0,
        size: int | None = None,
        align: int = 1,
        together: bool = True,
    ):
        self.length, self.size, self._align = length, size, np.uint64(align if together else length)
        self._vocab_size, self._seed, self._offset = vocab_size, seed, offset

    def rows(self, indices: np.ndarray) -> Batch:
        """Returns the rows at `indices` [n] as a batch (see `trainer.data.batches`) without the entry `row`."""
        keys = mix(mix(np.full(1, self._seed, np.uint64)) + np.asarray(indices, np.uint64) + np.uint64(self._offset))
        draw = np.stack([mix(keys + np.uint64(i)) for i in range(2 * (_CUTS + 1))], axis=1)
        column = np.arange(self.length)
        cuts = draw[:, :_CUTS] % np.uint64(self.length)
        cuts -= cuts % self._align
        segment = (column[None, None] >= cuts[..., None]).sum(axis=1)
        # Cuts that coincide, or are at column 0, cause gaps in `segment`, so the segment ids are computed by counting
        # the changes in `segment`.
        changes = np.diff(segment, axis=1, prepend=segment[:, :1]) != 0
        segmentation = 1 + np.cumsum(changes, axis=1)
        padding = draw[:, _CUTS] % np.uint64(self.length // 8 + 1)
        segmentation = np.where(column < self.length - padding[:, None].astype(np.int64), segmentation, 0)
        starts = np.take_along_axis(draw[:, _CUTS + 1 :], segment, axis=1) % np.uint64(self._vocab_size)
        batch = make_batch(starts, starts, segmentation)
        tokens = starts.astype(np.int64) + _STRIDE * batch["inputs_position"]
        batch["inputs"] = (tokens % self._vocab_size * (segmentation != 0)).astype(np.int32)
        batch["targets"] = ((tokens + _STRIDE) % self._vocab_size * (segmentation != 0)).astype(np.int32)
        return batch
