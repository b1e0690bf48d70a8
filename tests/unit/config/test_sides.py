"""Two or more configurations from one command line."""

import pytest

from trainer.config.errors import UserError
from trainer.config.flags import COMBINATIONS, combination
from trainer.config.sides import differences, load_sides

FIRST, *OTHERS = COMBINATIONS
needs_several = pytest.mark.skipif(not OTHERS, reason="there is one combination")


def test_words_of_one_side_win_over_those_for_all_and_later_ones_over_earlier():
    left, right = load_sides(["base.yml", "left.dtype=float32", "dtype=bfloat16", "steps=3", "left.steps=4"])
    assert (left.name, right.name) == ("left", "right")
    assert (left.words, right.words) == (("dtype=float32", "steps=4"), ())
    assert (left.loaded.config.dtype, right.loaded.config.dtype) == ("float32", "bfloat16")
    assert differences([left, right]) == {"dtype": ['"float32"', '"bfloat16"'], "steps": ["4", "3"]}


@needs_several
def test_a_combination_by_name_stands_for_its_flags():
    left, right = load_sides(["base.yml", f"left={OTHERS[0]}", f"right={OTHERS[-1]}", "right.scan_layers=false"])
    assert (left.name, right.name) == (OTHERS[0], OTHERS[-1])
    assert (combination(left.loaded.config), combination(right.loaded.config)) == (OTHERS[0], OTHERS[-1])
    assert (left.loaded.config.scan_layers, right.loaded.config.scan_layers) == (True, False)


@needs_several
def test_several_right_sides():
    sides = load_sides([f"left={FIRST}", "right=all"])
    assert [side.name for side in sides] == list(COMBINATIONS)
    assert [combination(side.loaded.config) for side in sides] == list(COMBINATIONS)
    other = OTHERS[0]
    sides = load_sides([f"left={FIRST}", f"right={FIRST},{other}", "right.remat_policy=full"])
    assert [side.name for side in sides] == ["left", f"right={FIRST}", f"right={other}"]
    assert [side.loaded.config.remat_policy for side in sides] == ["none", "full", "full"]


def test_no_side_named_is_one_configuration():
    (side,) = load_sides(["base.yml", "steps=3"])
    assert (side.name, side.words, side.loaded.config.steps) == ("", (), 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["left=nx"], "no combination nx; allowed: nnx.*; nearest: nnx"),
        pytest.param([f"left={FIRST},{OTHERS[0] if OTHERS else FIRST}"], "one combination", marks=needs_several),
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
