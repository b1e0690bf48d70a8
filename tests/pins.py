"""Ensures that no test takes its combination from base.yml by accident.

The suite runs on a copy of base.yml that sets the defaults of the three flags to a combination that no model supports.
A test that pins its combination is not affected. A test that runs a model without pinning it fails with
`KeyError: 'taken from base.yml'`. Tests that use the default on purpose have the mark `default_combination` and run on
the real base.yml.
"""

import contextlib
import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from trainer.config import flags
from trainer.config.flags import FLAGS

MARK = "default_combination"
# Tests that use the default, or whole files of them.
TAKE_THE_DEFAULT = (
    "unit/config/test_flags.py",
    "unit/config/test_load.py::test_the_packed_base_yml_needs_no_file",
    "unit/config/test_load.py::test_the_start_says_which_keys_of_the_preset_were_changed",
    "unit/docs/test_commands.py",
    "unit/docs/test_guides.py::test_the_guide_to_optimizers",
    "unit/docs/test_guides.py::test_the_guide_to_the_trees_beside_a_state",
    "unit/linen/test_flags.py",
    "unit/test_pins.py::test_whoever_takes_the_default_gets_that_of_base_yml",
)
UNPINNED = "taken from base.yml"
FLIPPED = (False, True, True)  # not one of the combinations
# Programs that run a model from a command line.
ENTRIES = ("trainer.train", "trainer.train_compile", "trainer.parity", "trainer.shardings", "launch_local.py")

_schema = importlib.import_module("trainer.config.schema")  # the package's `schema` is the function
_readers = (_schema, importlib.import_module("trainer.config.files"))
ORIGINAL = _schema.BASE_YML
_popen = subprocess.Popen
_NAMES = flags._NAMES


def flipped(text: str) -> str:
    """Returns base.yml's `text` with other defaults of the flags."""
    for flag, value in zip(FLAGS, FLIPPED, strict=True):
        text, found = re.subn(rf"^{flag}: (true|false)$", f"{flag}: {str(value).lower()}", text, flags=re.MULTILINE)
        assert found == 1, flag
    return text


class _Copy(type(Path())):
    """A copy of base.yml that counts as the same file as the checkout's base.yml, which may be in the current
    folder."""

    def stat(self, **options):
        return ORIGINAL.stat(**options)


class _Popen(subprocess.Popen):
    """Checks commands: other processes read the real base.yml, so their command lines must set the flags."""

    def __init__(self, args: Sequence[str] | str, *rest: object, **options: object):
        check_command(args if isinstance(args, str) else [str(word) for word in args])
        super().__init__(args, *rest, **options)


def check_command(words: Sequence[str] | str) -> None:
    """Fails if a command takes its combination from base.yml."""
    words = words.split() if isinstance(words, str) else words
    if any(word.endswith(ENTRIES) for word in words) and "--help" not in words:
        written = {word.rpartition(".")[2].partition("=")[0] for word in words if "=" in word}
        for word in words:  # a word may name a resolved configuration
            if word.endswith("config.yml") and Path(word).is_file():
                written |= {line.partition(":")[0] for line in Path(word).read_text(encoding="utf-8").splitlines()}
        assert written >= set(FLAGS) or {"left", "right"} <= written, f"pin the combination of {' '.join(words)}"


@contextlib.contextmanager
def flipped_defaults() -> Iterator[None]:
    """Within this context, everything in this process that reads the configuration reads base.yml with changed
    defaults."""
    with tempfile.TemporaryDirectory() as folder:
        copy = _Copy(folder, "base.yml")
        copy.write_text(flipped(ORIGINAL.read_text(encoding="utf-8")), encoding="utf-8")
        _flip(copy)
        try:
            yield
        finally:
            _restore()


@contextlib.contextmanager
def true_defaults() -> Iterator[None]:
    """Within this context, inside `flipped_defaults`, the real base.yml is read."""
    copy = _schema.BASE_YML
    _restore()
    try:
        yield
    finally:
        _flip(copy)


def _flip(copy: Path) -> None:
    # flags.py finds a combination's name here. COMBINATIONS still has only the real ones.
    flags._NAMES = _NAMES | {FLIPPED: UNPINNED}
    _read_from(copy)
    subprocess.Popen = _Popen


def _restore() -> None:
    flags._NAMES = _NAMES
    _read_from(ORIGINAL)
    subprocess.Popen = _popen


def _read_from(path: Path) -> None:
    for module in _readers:
        module.BASE_YML = path
    _schema.schema.cache_clear()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: takes the combination of base.yml on purpose")
    config.stash[_KEY] = contextlib.ExitStack()
    config.stash[_KEY].enter_context(flipped_defaults())


_KEY = pytest.StashKey[contextlib.ExitStack]()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_KEY].close()


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        if item.get_closest_marker(MARK) and not {name, name.partition("::")[0]} & set(TAKE_THE_DEFAULT):
            raise pytest.UsageError(f"{name} takes the combination of base.yml: pin it, or list it in tests/pins.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with true_defaults() if item.get_closest_marker(MARK) else contextlib.nullcontext():
        return (yield)
