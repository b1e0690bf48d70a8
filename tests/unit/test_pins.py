"""Which tests use base.yml's combination, and that no other test can; see tests/pins.py."""

import subprocess
import sys
from pathlib import Path

import pytest
from pins import (
    FLIPPED,
    MARK,
    TAKE_THE_DEFAULT,
    UNPINNED,
    check_command,
    flipped,
    pytest_collection_modifyitems,
)
from support import ALL_COMBINATIONS, arguments, pinned, tiny_config

from trainer.backends.registry import make_model
from trainer.config.flags import combination, flags_of
from trainer.config.load import load
from trainer.config.resolve import resolve

TESTS = Path(__file__).parents[1]


def test_the_defaults_are_flipped_here():
    config = load([]).config
    assert combination(config) == UNPINNED
    assert UNPINNED not in ALL_COMBINATIONS
    resolved = resolve(config, device_count=1, platform="cpu")
    with pytest.raises(KeyError, match=UNPINNED):
        make_model(resolved)


@pytest.mark.parametrize("name", ALL_COMBINATIONS)
def test_whoever_pins_does_not_notice(name):
    assert combination(tiny_config(name)) == name
    assert combination(load(arguments(name)).config) == name
    assert pinned(name) == flags_of(name)


@pytest.mark.default_combination
def test_whoever_takes_the_default_gets_that_of_base_yml():
    assert combination(load([]).config) == "nnx"


def test_only_the_defaults_of_the_flags_are_flipped():
    text = (Path(sys.modules["trainer"].__file__).parent / "base.yml").read_text()
    changed = [(a, b) for a, b in zip(text.splitlines(), flipped(text).splitlines(), strict=True) if a != b]
    assert [new.partition(": ")[2] == "true" for _, new in changed] == [new for new in FLIPPED if not new]


def test_other_processes_pin_on_their_command_line():
    with pytest.raises(AssertionError, match="pin the combination"):
        subprocess.run([sys.executable, "-m", "trainer.train", "base.yml", "enable_nnx=true"], check=True)
    check_command(["python", "-m", "trainer.train", "base.yml", *(f"{k}={v}" for k, v in pinned("nnx").items())])
    check_command(["python", "-m", "trainer.parity", "base.yml", "left=linen", "right=nnx"])


def test_whoever_is_not_on_the_list_can_not_take_the_default():
    class Item:
        nodeid = "tests/unit/data/test_cache.py::test_new[a]"

        def get_closest_marker(self, name):
            return name == MARK

    with pytest.raises(pytest.UsageError, match="takes the combination of base"):
        pytest_collection_modifyitems([Item()])


def test_the_list_has_no_dead_entry():
    for entry in TAKE_THE_DEFAULT:
        file, _, name = entry.partition("::")
        path = TESTS / file
        if path.is_file():  # tests of Linen will be deleted together with Linen
            assert MARK in path.read_text()
            assert f"def {name}" in path.read_text()
