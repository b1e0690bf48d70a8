"""The types of the keys, which mypy reads from keys.pyi, and what a new key needs."""

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.schema import parse, schema

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


LINES = "# What the new key means.\nnew_key: 3  # in [1, 9]\nnew_file: ''\n# ---- Checkpoints "
ROWS = """
ROWS += (Row(("new_key",), Resume.UPDATE, step=False), Row(("new_file",), path=Place.LOCAL, code=True))
CHECKS += ((("new_key", "steps"), lambda c: "more than steps" if c.new_key > c.steps else None),)
INERT += (Inert(("new_key",), lambda c: c.steps == 5, "steps=5"),)
"""
PROGRAM = """
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.capabilities.all_keys import step_keys
from trainer.config.resume import MAY_CHANGE, UPDATE
from trainer.config.trust import names_code
from trainer.config.schema import schema

def said(*words):
    try:
        return load([*words]).warnings
    except UserError as error:
        return str(error)

assert load(["new_key=4"]).config.new_key == 4
assert "in [1, 9]" in said("new_key=10"), said("new_key=10")
assert "more than steps" in said("new_key=4", "steps=2")
assert any("no effect: steps=5" in line for line in said("new_key=4", "steps=5"))
assert "remote paths are not supported" in said("new_file=s3://a")
assert "new_key" in UPDATE and "new_key" not in MAY_CHANGE and "new_file" not in (*UPDATE, *MAY_CHANGE)
assert "new_key" not in step_keys() and "new_file" in step_keys()
assert names_code(schema().keys["new_file"], "a")
"""


def test_two_edits_make_a_key(tmp_path):
    """The edits are in base.yml and in the file of the key's capability; scripts/write_keys.py then writes the type."""
    copy = tmp_path / "trainer"
    shutil.copytree(ROOT / "src/trainer", copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "base.yml").read_text().replace("# ---- Checkpoints ", LINES, 1)
    (copy / "base.yml").write_text(text)
    with (copy / "config" / "capabilities" / "run_keys.py").open("a") as file:
        file.write(ROWS)
    assert "    new_key: int\n" in write_keys.stub(parse(text))
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
