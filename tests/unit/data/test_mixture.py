"""Mixtures as a function of the row's index."""

from fractions import Fraction

import numpy as np
import pytest

from trainer.config.capabilities.data_keys import parse_mixture
from trainer.config.errors import UserError
from trainer.data.batches import train_batch
from trainer.data.mixture import MixedRows, interleave, whole_weights

from .test_batches import Numbered


@pytest.mark.parametrize("weights", [(1,), (1, 1), (7, 3), (3, 1, 2), (1, 1000), (5, 1, 1, 1)])
def test_shares_are_even_and_each_component_counts_its_own_rows(weights: tuple[int, ...]):
    total = sum(weights)
    component, within = interleave(np.arange(3 * total), weights)
    for i, weight in enumerate(weights):
        here = component == i
        assert here.sum() == 3 * weight
        assert within[here].tolist() == list(range(3 * weight))
        assert np.abs(np.cumsum(here) - np.arange(1, 3 * total + 1) * weight / total).max() < len(weights)


def test_a_row_does_not_depend_on_who_asks():
    whole = interleave(np.arange(100), (7, 3))
    for indices in (np.array([99, 5, 5]), np.arange(37, 51)):
        for some, all_ in zip(interleave(indices, (7, 3)), whole, strict=True):
            assert some.tolist() == all_[indices].tolist()
    large = 10**12
    component, within = interleave(np.arange(large, large + 10), (7, 3))
    assert (component == 0).sum() == 7
    assert abs(within[component == 0][0] - 0.7 * large) <= 1


def test_mixed_rows_visit_each_source_by_epochs_of_its_own():
    mixed = MixedRows([Numbered(10), Numbered(4)], (1, 1), seed=0, shuffle=True)
    batch = train_batch(mixed, 0, 40, seed=0, shuffle=True)
    values, from_first = batch["inputs"][:, 0] - 1, interleave(np.arange(40), (1, 1))[0] == 0
    assert [sorted(values[from_first][i : i + 10].tolist()) for i in (0, 10)] == [list(range(10))] * 2
    assert [sorted(values[~from_first][i : i + 4].tolist()) for i in range(0, 20, 4)] == [list(range(4))] * 5
    parts = [train_batch(mixed, 0, 40, seed=0, shuffle=True, process_index=i, process_count=4) for i in range(4)]
    assert np.concatenate([part["inputs"] for part in parts]).tolist() == batch["inputs"].tolist()


def test_sources_of_one_size_are_not_visited_in_one_order():
    mixed = MixedRows([Numbered(50), Numbered(50)], (1, 1), seed=0, shuffle=True)
    values = train_batch(mixed, 0, 100, seed=0, shuffle=True)["inputs"][:, 0]
    assert values[::2].tolist() != values[1::2].tolist()


@pytest.mark.parametrize(
    ("weights", "whole"),
    [(["0.7", "0.3"], (7, 3)), (["1", "1"], (1, 1)), (["1/3", "2/3"], (1, 2)), (["2.5", "0.5"], (5, 1))],
)
def test_weights_are_exact_ratios(weights: list[str], whole: tuple[int, ...]):
    assert whole_weights([Fraction(weight) for weight in weights]) == whole


def test_weights_that_are_no_small_ratio_are_rounded_to_a_millionth():
    weights = [Fraction("0.123456789123"), Fraction("0.876543210877")]
    first, second = whole_weights(weights)
    assert abs(first / (first + second) - 0.123456789123) < 1e-6


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("a/*.x", [("a/*.x", 1)]),
        ("a;b", [("a", 1), ("b", 1)]),
        ("a*,0.7; b*,0.3", [("a*", Fraction("0.7")), ("b*", Fraction("0.3"))]),
        ("a,2", [("a", 2)]),
    ],
)
def test_mixtures_are_read_as_maxtext_writes_them(files: str, expected: list):
    assert parse_mixture(files, "") == expected


@pytest.mark.parametrize("files", ["a,0;b,1", "a,x", "a,1;b", ",1", ";", "a,-1", "a,1/0"])
def test_what_is_no_mixture_is_refused(files: str):
    with pytest.raises(UserError, match=r"write glob,weight;glob,weight|names no files"):
        parse_mixture(files, "")
