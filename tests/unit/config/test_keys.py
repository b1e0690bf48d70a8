"""The types of the keys: mypy reads them from keys.pyi, and every configuration in src has them."""

import ast
import importlib.util
from pathlib import Path

import pytest

from trainer.config import schema
from trainer.config.schema import parse

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("write_keys", ROOT / "scripts" / "write_keys.py")
write_keys = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(write_keys)


def test_keys_pyi_has_the_keys_of_base_yml():
    assert write_keys.STUB.read_text() == write_keys.stub(schema()), "run scripts/write_keys.py"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("key: 3", "int"),
        ("key: true", "bool"),
        ("key: x  # one of x, y", "str"),
        ("key: 1.5  # in [0, 2]", "float"),
        ("key: null  # float or none", "float | None"),
        ("key: []  # list of str", "tuple[str, ...]"),
        ("key: null  # list of int or none", "tuple[int, ...] | None"),
        ("key: [[a, b]]  # list of any", "tuple[Any, ...]"),
    ],
)
def test_the_type_of_a_key(line, kind):
    assert write_keys.stub(parse(f"# ---- Section ----\n\n{line}\n")).endswith(f"    key: {kind}\n")


def test_every_configuration_in_src_has_types():
    """A parameter `config` without a type would hide a misspelled key from mypy."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for it in [*node.args.args, *node.args.kwonlyargs]:
                    untyped = it.annotation is None or ast.unparse(it.annotation) == "Any"
                    assert it.arg != "config" or not untyped or path.name == "hf_files.py", f"{path}:{node.lineno}"
