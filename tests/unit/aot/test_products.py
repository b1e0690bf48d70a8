"""Operations of convolutions, counted without a table of all positions."""

import time
from itertools import product

import numpy as np
import pytest

from trainer.aot.products import _valid_positions


def by_table(size, kernel, output, stride, low, dilation, spread):
    place = np.arange(output)[:, None] * stride - low + np.arange(kernel)[None] * spread
    return int(((place % dilation == 0) & (place >= 0) & (place // dilation < size)).sum())


@pytest.mark.parametrize("dilation", [1, 2, 3, 4])
def test_places_that_meet_an_element(dilation):
    for size, kernel, output, stride, low, spread in product((1, 4), (1, 3, 6), (1, 5), (1, 2, 3), (-2, 0, 5), (1, 2)):
        case = size, kernel, output, stride, low, dilation, spread
        assert _valid_positions(*case) == by_table(*case), case


def test_two_million_rows_take_no_table_of_their_pairs():
    started = time.process_time()
    rows = 2_097_151  # an int64 table of all pairs would take 32 TiB
    assert _valid_positions(rows, rows, rows, 1, rows - 1, 1, 1) == rows * (rows + 1) // 2
    assert time.process_time() - started < 5
