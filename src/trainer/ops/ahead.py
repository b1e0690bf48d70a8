"""Shifts arrays of packed rows to the left, within their segments. NumPy, on the host, where rows are not sharded."""

import numpy as np


def shift_left(x_bt: np.ndarray) -> np.ndarray:
    """Returns x [b, t] shifted left by one along t. The last entry of each row is 0."""
    return np.pad(x_bt[:, 1:], ((0, 0), (0, 1)))


def still_inside(segment_bt: np.ndarray) -> np.ndarray:
    """Returns segments int [b, t] in which the last token of each segment becomes padding (0).

    Applied k times, it keeps exactly the tokens with k successors in the same segment.
    """
    return np.where(shift_left(segment_bt) == segment_bt, segment_bt, 0)
