"""The difference of two arrays, and when they count as equal."""

import math

import ml_dtypes
import numpy as np
import pytest

from trainer.compare.difference import BITS, Tolerance, difference, differences


def of(left, right, tolerance=BITS, dtype=np.float32):
    return difference("x", np.asarray(left, dtype), np.asarray(right, dtype), tolerance)


def test_sizes_are_of_the_largest_difference_and_magnitude():
    found = of([1.0, -8.0, 3.0], [1.5, -8.0, 3.0])
    assert (found.bits, found.equal) == (False, False)
    assert (found.absolute, found.relative) == (0.5, 0.5 / 8)


@pytest.mark.parametrize(
    ("tolerance", "equal"),
    [
        (BITS, False),
        (Tolerance(rtol=0.07), True),
        (Tolerance(rtol=0.06), False),
        (Tolerance(atol=0.5), True),
        (Tolerance(atol=0.4, rtol=0.01), False),
    ],
)
def test_a_tolerance_is_absolute_or_relative(tolerance, equal):
    found = of([1.0, -8.0], [1.5, -8.0], tolerance)
    assert (found.bits, found.equal) == (False, equal)


def test_equal_bits_and_what_only_looks_like_them():
    assert of([1.0, math.nan], [1.0, math.nan]).bits
    zeros = of([0.0], [-0.0])
    assert (zeros.bits, zeros.equal, zeros.absolute) == (False, False, 0.0)
    assert of([0.0], [-0.0], Tolerance(atol=1e-9)).equal
    other = difference("x", np.ones(2, np.float32), np.ones(2, ml_dtypes.bfloat16), BITS)
    assert (other.bits, other.equal, other.note) == (False, False, "float32 against bfloat16")


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, ml_dtypes.int4, bool])
def test_what_counts_is_equal_or_not(dtype):
    found = of([1, 0], [1, 1], Tolerance(rtol=1.0, atol=9.0), dtype)
    assert (found.bits, found.equal, found.absolute) == (False, False, 1.0)
    assert of([1, 0], [1, 0], Tolerance(rtol=1.0), dtype).equal
    assert of([1.0], [1.5], Tolerance(atol=1.0), ml_dtypes.bfloat16).equal
    other = difference("x", np.ones(2, dtype), np.ones(2, np.float32), Tolerance(rtol=1.0))
    assert (other.equal, other.absolute) == (False, 0.0)


@pytest.mark.parametrize("right", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_one_side_lies_infinitely_apart(right):
    found = of(2.0, right, Tolerance(rtol=1.0, atol=1e9))
    assert (found.equal, found.absolute) == (False, math.inf)


def test_infinities_of_one_sign_are_equal_and_do_not_count_as_magnitudes():
    found = of([math.inf, 1.0], [math.inf, 2.0])
    assert (found.absolute, found.relative) == (1.0, 0.5)


def test_arrays_with_layers_are_compared_layer_by_layer_and_what_is_missing_is_named():
    left = {"decoder/layers/w": np.zeros((3, 2)), "norm": np.zeros(4), "gone": np.zeros(1)}
    right = {"norm": np.zeros(5), "decoder/layers/w": np.array([[0, 0], [0, 1], [0, 0]]) * 1.0, "new": np.zeros(1)}
    found = {it.where: (it.equal, it.note) for it in differences(left, right, BITS, {"decoder/layers/w": range(3)}.get)}
    assert found == {
        "decoder/layers/w, layer 0": (True, ""),
        "decoder/layers/w, layer 1": (False, ""),
        "decoder/layers/w, layer 2": (True, ""),
        "norm": (False, "shape [4] against [5]"),
        "gone": (False, "only on the left"),
        "new": (False, "only on the right"),
    }


def test_a_number_that_a_stack_has_once_is_compared_as_it_is():
    name = "decoder/layers/count"
    (found,) = differences({name: np.float32(1)}, {name: np.float32(3)}, BITS, lambda name: range(2))
    assert (found.layer, found.equal, found.absolute) == (None, False, 2.0)


def test_an_axis_that_is_longer_than_the_stack_is_compared_whole():
    """For example, four islands of a model with two layers."""
    left, right = np.zeros((4, 3)), np.zeros((4, 3))
    right[3] = 1
    (found,) = differences({"x": left}, {"x": right}, BITS, lambda name: range(2))
    assert not found.equal
    assert found.layer is None
