"""docs/from-maxtext-python.md names existing functions and classes, with their arguments."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "from-maxtext-python.md"


def rows():
    """The three cells of each row of the page's tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(cell):
    """Returns the names in backticks, with their arguments or ""."""
    return re.findall(r"`((?:python -m )?[\w./]+)(?:\((.*?)\))?`", cell)


def found(name):
    """Returns the object `name`, after importing its longest prefix that is a module."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        value = module
        for part in parts[count:]:
            fields = getattr(value, "__dataclass_fields__", {})
            value = fields[part] if part in fields else getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize(("name", "given"), [it for row in rows() for it in names(row[1])])
def test_a_name_exists_with_its_arguments(name, given):
    if name.startswith("scripts/"):
        assert (ROOT / name).is_file()
    elif name.startswith("python -m "):
        assert importlib.util.find_spec(name.removeprefix("python -m "))
    else:
        value = found(name)
        if inspect.ismodule(value):  # `trainer.training.start` is both a module and a function of the package
            value = getattr(value, name.rpartition(".")[2])
        parameters = inspect.signature(value).parameters if given else {}
        for word in filter(None, given.split(", ")):
            argument, _, default = word.lstrip("*").partition("=")
            assert not argument or argument in parameters
            assert not default or repr(parameters[argument].default) == default


def test_every_row_has_a_name_of_maxtexts_and_one_of_ours_or_none():
    assert len(rows()) > 60
    for theirs, ours, _ in rows():
        assert "`" in theirs
        assert (ours == "none") != bool(names(ours)), ours


def test_names_that_are_not_there_are_found_out():
    for bad in ("trainer.state.no_such_name", "trainer.training.Run.no_such_name", "no_such_module.x"):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            found(bad)
