"""The tables of commands and of packages match what exists, and each command's --help prints its own usage."""

import contextlib
import importlib
import io
import re
import tomllib
from pathlib import Path

import pytest

from trainer.config.flags import FLAGS

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "trainer"
COMMANDS = sorted(path.stem for path in PACKAGE.glob("*.py") if '__name__ == "__main__"' in path.read_text())
PACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_the_usage_of_its_own_command(command):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        importlib.import_module(f"trainer.{command}").main(["--help"])
    usage = output.getvalue().split("\n\n")[0]
    assert set(re.findall(r"python -m trainer\.(\w+)", usage)) == {command}
    assert usage.startswith("usage: ")


def test_options_are_listed_for_the_commands_that_have_them(capsys):
    from trainer import dpo, grpo

    for program, shows in ((dpo, True), (grpo, False)):
        program.main(["--help"])
        text = capsys.readouterr().out
        assert ("--show N" in text) == shows
        assert "\n--dry-run " in text


def test_the_readme_lists_every_command():
    table = (ROOT / "README.md").read_text().split("| `trainer.` | |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == COMMANDS


def test_contributing_lists_every_package_in_the_order_of_the_contract():
    table = (ROOT / "CONTRIBUTING.md").read_text().split("```")[3]
    listed = [name for line in table.splitlines()[2:] for name in re.match(r"(\w+  )*(\w+)(?=  )", line)[0].split()]
    (layers,) = (contract["layers"] for contract in CONTRACTS if contract["type"] == "layers")
    assert set(listed) == PACKAGES or not FLAGS  # one package is removed with the flags
    listed = [name for name in listed if name in PACKAGES]
    ranks = {name: rank for rank, line in enumerate(layers) for name in re.findall(r"\w+", line)}
    assert [ranks[name] for name in listed] == sorted(ranks[name] for name in listed)


def test_nothing_is_left_out_of_the_contract_on_the_package_that_nothing_imports():
    contracts = [contract for contract in CONTRACTS if contract["type"] == "forbidden"]
    assert len(contracts) == bool(FLAGS)
    for contract in contracts:
        every = {f"trainer.{name}" for name in PACKAGES | {*COMMANDS}}
        assert set(contract["source_modules"]) == every - {*contract["forbidden_modules"]}
