"""The table that maps the three flags to the name of a combination."""

import itertools
import re

import pytest
from support import ALL_COMBINATIONS

from trainer.config.errors import UserError
from trainer.config.flags import COMBINATIONS, FLAGS, combination, flags_of, unsupported
from trainer.config.load import load
from trainer.config.schema import BASE_YML

pytestmark = pytest.mark.default_combination  # tests the table itself


def words(flags: dict[str, bool]) -> list[str]:
    return [f"{name}={value}" for name, value in flags.items()]


@pytest.mark.parametrize("name", ALL_COMBINATIONS)
def test_each_combination_is_found_by_its_flags(name):
    assert combination(load(words(flags_of(name))).config) == name


def test_no_other_setting_is_a_combination():
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


def test_the_table_is_that_of_base_yml():
    rows = re.findall(r"^#   (true|false) +(true|false) +(true|false) ", BASE_YML.read_text(), re.MULTILINE)
    assert [tuple(word == "true" for word in row) for row in rows] == list(COMBINATIONS.values())
