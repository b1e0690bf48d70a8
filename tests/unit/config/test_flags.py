"""The table from the three flags to a combination's name."""

import itertools
import re

import pytest

from trainer.config import COMBINATIONS, UserError, combination, flags_of, load
from trainer.config.flags import FLAGS, unsupported
from trainer.config.schema import BASE_YML


def words(flags: dict[str, bool]) -> list[str]:
    return [f"{name}={value}" for name, value in flags.items()]


@pytest.mark.parametrize("name", COMBINATIONS)
def test_each_combination_is_found_by_its_flags(name):
    assert combination(load(words(flags_of(name))).config) == name


def test_five_of_the_eight_settings_are_combinations():
    supported = []
    for values in itertools.product((False, True), repeat=3):
        config = load([]).config
        config.update(dict(zip(FLAGS, values, strict=True)))
        if unsupported(config) is None:
            supported.append(values)
        else:
            with pytest.raises(UserError, match="nearest: set "):
                combination(config)
    assert sorted(supported) == sorted(COMBINATIONS.values())


@pytest.mark.parametrize(
    ("flags", "ways"),
    [
        ("enable_nnx=false", {"nnx": "enable_nnx=true", "linen": "pure_nnx_decoder=false pure_nnx=false"}),
        ("enable_nnx=false pure_nnx=false", {"bridged": "enable_nnx=true", "linen": "pure_nnx_decoder=false"}),
        (
            "enable_nnx=false pure_nnx_decoder=false",
            {"nnx_linen_decoder": "enable_nnx=true", "linen": "pure_nnx=false"},
        ),
    ],
)
def test_the_message_names_the_flag_to_change_and_the_change_helps(flags, ways):
    with pytest.raises(UserError) as caught:
        load(flags.split())
    for name, changes in ways.items():
        assert f"set {changes} (combination {name})" in str(caught.value)
        assert combination(load([*flags.split(), *changes.split()]).config) == name


def test_the_table_is_that_of_base_yml():
    rows = re.findall(r"^#   (true|false) +(true|false) +(true|false) ", BASE_YML.read_text(), re.MULTILINE)
    assert [tuple(word == "true" for word in row) for row in rows] == list(COMBINATIONS.values())
