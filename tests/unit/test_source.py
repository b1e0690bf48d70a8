"""Properties of the source: which files name the flags, what packages may import, and how fast the package loads."""

import ast
import contextlib
import importlib
import re
from pathlib import Path

import pytest
from sources import FILES, SOURCE, imported, nodes

from trainer.config.flags import FLAGS
from trainer.models import FAMILIES


def test_one_file_names_the_flags():
    naming = [path.relative_to(SOURCE) for path in FILES if any(flag in path.read_text() for flag in FLAGS)]
    assert naming == ([Path("config/flags.py")] if FLAGS else [])  # empty after the flags are removed


def test_layers_models_and_ops_hold_no_mesh():
    for package in ("layers", "models", "ops"):
        for path in (SOURCE / package).rglob("*.py"):
            assert not any(name.startswith("jax.sharding") for name in imported(path)), path


def test_layers_and_ops_take_no_configuration():
    """They may import errors, and names and types of single capabilities, so that a block works in a notebook."""
    for package in ("layers", "ops"):
        for path in (SOURCE / package).rglob("*.py"):
            names = [name for name in imported(path) if name.startswith("trainer.config.")]
            allowed = ("trainer.config.errors.", "trainer.config.capabilities.")
            assert not [name for name in names if not name.startswith(allowed)], path


def test_an_import_names_the_file():
    """So that importing one file does not load its siblings. Sharding's helpers form one interface."""
    packages = {path.parent.name: imported(path) for path in FILES if path.name == "__init__.py"}
    with_names = [name for name, found in packages.items() if any(it.startswith("trainer") for it in found)]
    assert {*with_names} - {"trainer"} == {"sharding"}


def test_only_products_knows_qwix():
    """HiQArray will replace QArray, and functions that are not public may change."""
    found = [path.relative_to(SOURCE) for path in FILES if any(name.startswith("qwix") for name in imported(path))]
    assert sorted(map(str, found)) == [
        "products/calibrated.py",
        "products/dequantized.py",
        "products/quantized.py",
        "products/sparse.py",
    ]


def test_importing_the_package_and_the_configuration_loads_no_jax():
    import subprocess
    import sys

    code = "import sys, trainer, trainer.config, trainer.train; print('jax' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_only_models_names_a_family():
    """Code must not, but a docstring may cite a family's paper."""
    for path in FILES:
        if path.relative_to(SOURCE).parts[0] != "models" and any(name in path.read_text().lower() for name in FAMILIES):
            assert words_of(path).isdisjoint(FAMILIES), path


def words_of(path: Path) -> set[str]:
    """Returns the words in the names and strings of a file's code, without docstrings and comments."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {id(node.body[0].value) for node in nodes(path) if isinstance(node, documented) and is_text(node)}
    text = [
        str(value)
        for node in nodes(path)
        if id(node) not in docstrings
        for _, value in ast.iter_fields(node)
        if isinstance(value, str)
    ]
    return {word.lower() for line in text for word in re.findall(r"\w+", line)}


def is_text(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> bool:
    return bool(node.body) and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)


@pytest.mark.parametrize(
    "path", sorted(path for path in SOURCE.glob("*.py") if path.stem != "__init__"), ids=lambda path: path.stem
)
def test_every_program_answers_help(path, capsys):
    program = importlib.import_module(f"trainer.{path.stem}")
    with contextlib.suppress(SystemExit):
        program.main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m trainer.")
