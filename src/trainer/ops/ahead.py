"""Shifts arrays of packed rows to the left, and masks tokens without a successor. Uses NumPy on the unsharded rows."""

import numpy as np


def shift_left(x_bt: np.ndarray) -> np.ndarray:
    """Returns x [b, t] shifted left by one along t. The last entry of each row is 0."""
    return np.pad(x_bt[:, 1:], ((0, 0), (0, 1)))


def still_inside(segment_bt: np.ndarray) -> np.ndarray:
    """Returns `segment_bt` with the last token of each segment replaced by padding (0): int [b, t].

    Applied k times, the function keeps exactly the tokens with at least k successors in the same segment.
    """
    return np.where(shift_left(segment_bt) == segment_bt, segment_bt, 0)
