"""Every key is read by code outside the configuration, or by a function or table that such code uses."""

import ast
from collections.abc import Iterator
from pathlib import Path

from trainer.config.derived import DCN, ICI
from trainer.config.schema import schema

SOURCES = Path(__file__).parents[3] / "src/trainer"
# The files of config/ whose definitions count where code uses them. The others load, check and print all keys.
READERS = ("capabilities/", "derived.py", "flags.py")
TABLES = ("ROWS", "CHECKS", "INERT", "INERT_HERE")  # say when a key is valid or has an effect; they do not read it
COMPUTED = {key for axis_keys in (ICI, DCN) for key in axis_keys.values()}  # read as f"ici_{axis}_parallelism"


def words(node: ast.AST, *kinds: type) -> set[str]:
    """Returns the attributes, whole strings, names and imported names in some code, as far as they are of `kinds`."""
    fields = {ast.Attribute: "attr", ast.Constant: "value", ast.Name: "id", ast.alias: "name"}
    found = (getattr(each, fields[type(each)]) for each in ast.walk(node) if type(each) in kinds)
    return {word for word in found if isinstance(word, str)}


def defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yields the name and the code of each function, class and variable of a module, except for the TABLES."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)):
                if name not in TABLES:
                    yield name, node


def read() -> set[str]:
    """Returns all attributes and strings in the code outside config/, and in the definitions of READERS that this code
    uses."""
    definitions: dict[str, list[ast.AST]] = {}
    todo: list[ast.AST] = []
    for path in SOURCES.rglob("*.py"):
        tree, place = ast.parse(path.read_text()), path.relative_to(SOURCES).as_posix()
        if not place.startswith("config/"):
            todo.append(tree)
        elif place.removeprefix("config/").startswith(READERS):
            for name, node in defined(tree):
                definitions.setdefault(name, []).append(node)
    found: set[str] = set()
    followed: set[str] = set()
    while todo:
        node = todo.pop()
        found |= words(node, ast.Attribute, ast.Constant)
        used = words(node, ast.Attribute, ast.Name, ast.alias) & definitions.keys() - followed
        followed |= used
        todo += [each for name in used for each in definitions[name]]
    return found


def test_every_key_is_read():
    assert set(schema().keys) - COMPUTED <= read()
