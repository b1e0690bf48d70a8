"""Two and more configurations from one command line."""

import pytest

from trainer.config import COMBINATIONS, UserError, combination, differences, load_sides


def test_words_of_one_side_win_over_those_for_all_and_later_ones_over_earlier():
    left, right = load_sides(["base.yml", "left.dtype=float32", "dtype=bfloat16", "steps=3", "left.steps=4"])
    assert (left.name, right.name) == ("left", "right")
    assert (left.words, right.words) == (("dtype=float32", "steps=4"), ())
    assert (left.loaded.config.dtype, right.loaded.config.dtype) == ("float32", "bfloat16")
    assert differences([left, right]) == {"dtype": ['"float32"', '"bfloat16"'], "steps": ["4", "3"]}


def test_a_combination_by_name_stands_for_its_flags():
    left, right = load_sides(["base.yml", "left=linen", "right=bridged", "right.scan_layers=false"])
    assert (left.name, right.name) == ("linen", "bridged")
    assert (combination(left.loaded.config), combination(right.loaded.config)) == ("linen", "bridged")
    assert (left.loaded.config.scan_layers, right.loaded.config.scan_layers) == (True, False)


def test_several_right_sides():
    sides = load_sides(["left=nnx", "right=all"])
    assert [side.name for side in sides] == list(COMBINATIONS)
    assert [combination(side.loaded.config) for side in sides] == list(COMBINATIONS)
    sides = load_sides(["left=linen", "right=linen,bridged", "right.remat_policy=full"])
    assert [side.name for side in sides] == ["left", "right=linen", "right=bridged"]
    assert [side.loaded.config.remat_policy for side in sides] == ["none", "full", "full"]


def test_no_side_named_is_one_configuration():
    (side,) = load_sides(["base.yml", "steps=3"])
    assert (side.name, side.words, side.loaded.config.steps) == ("", (), 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["left=nxn"], "no combination nxn; allowed: nnx, .*; nearest: nnx"),
        (["left=nnx,linen"], "one combination"),
        (["left=all"], "one combination"),
        (["right=all,nnx"], "no combination all"),
        (["left=nnx", "right.dtyp=float32"], "right: 1 mistake.*no key dtyp; nearest: dtype"),
        (["lft.dtype=float32"], r"no key lft\.dtype"),
        (["left.dtype"], "left: 1 mistake.*no value; write dtype=VALUE"),
    ],
)
def test_mistakes_name_the_side(words, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        load_sides(["base.yml", *words])
