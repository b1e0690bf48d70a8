"""Mixes rows from several sources (components). The component of a row is a pure function of the row's index."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from trainer.data.batches import FIELDS, Batch, RowSource
from trainer.data.order import visited

_PRECISION = 10**6  # weights whose ratio needs larger integers are rounded to a millionth of their sum


def whole_weights(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Returns positive integers in the ratio of `weights`. The ratio is exact if the weights, multiplied by their
    common denominator, add up to at most a million; otherwise it is rounded."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    if sum(whole) > _PRECISION:
        whole = [max(1, round(_PRECISION * weight / sum(weights))) for weight in weights]
    divisor = math.gcd(*whole)
    return tuple(weight // divisor for weight in whole)


def interleave(indices: np.ndarray, weights: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the component of each row in `indices` [n], and the row's index within that component, both int64 [n].

    For any k, each component has about its share of the first k rows. Component i gets the fraction
    weights[i] / (weights[i] + all later weights) of the rows that do not belong to earlier components, evenly spaced,
    as in grain.MapDataset.mix.
    """
    component = np.full(len(indices), -1, np.int64)
    within = np.zeros(len(indices), np.int64)
    # For each index, how many rows before it, and how many up to and including it, belong to no earlier component.
    before, through = indices.astype(np.int64), indices.astype(np.int64) + 1
    left = sum(weights)
    for i, weight in enumerate(weights):
        next_before, next_through = before * (left - weight) // left, through * (left - weight) // left
        here = (component < 0) & (before - next_before != through - next_through)
        component[here], within[here] = i, (before - next_before)[here]
        before, through, left = next_before, next_through, left - weight
    return component, within


class MixedRows:
    """An endless stream of rows from several sources in the ratio of `weights`. Each source is repeated separately."""

    size = None

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[int], *, seed: int, shuffle: bool):
        self._sources, self._weights, self._seed, self._shuffle = sources, weights, seed, shuffle
        self.length = sources[0].length

    def rows(self, indices: np.ndarray) -> Batch:
        """Returns the rows at `indices` [n] as a batch (see `trainer.data.batches`) without the entry `row`."""
        component, within = interleave(indices, self._weights)
        batch = {name: np.zeros((len(indices), self.length), np.int32) for name in FIELDS}
        for i, source in enumerate(self._sources):
            here = component == i
            if here.any():
                assert source.size is not None
                # One seed per source, so that two sources of equal size are visited in different orders.
                own = visited(within[here], source.size, seed=self._seed + (i << 32), shuffle=self._shuffle)
                for name, values in source.rows(own).items():
                    batch[name][here] = values
        return batch
