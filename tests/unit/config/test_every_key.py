"""Every key is read by code outside the configuration, or by a function or table that such code uses."""

import ast
from collections.abc import Iterator
from pathlib import Path

from trainer.config.derived import DCN, ICI
from trainer.config.schema import schema

SOURCES = Path(__file__).parents[3] / "src/trainer"
# The files of config/ whose definitions count where code uses them. The others load, check and print all keys.
READERS = ("capabilities/", "derived.py", "flags.py")
COMPUTED = {key for axis_keys in (ICI, DCN) for key in axis_keys.values()}  # read as f"ici_{axis}_parallelism"


def words(node: ast.AST) -> set[str]:
    """Returns the names, the attributes and the whole strings in some code."""
    kinds = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name", ast.Constant: "value"}
    found = (getattr(each, kinds[type(each)]) for each in ast.walk(node) if type(each) in kinds)
    return {word for word in found if isinstance(word, str)}


def defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yields the name and the code of each function, class and variable of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)):
                yield name, node


def read() -> set[str]:
    """Returns all words of the code outside config/, and of the definitions of READERS that it uses."""
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
    while todo:
        new = words(todo.pop()) - found
        found |= new
        todo += [node for name in new for node in definitions.get(name, ())]
    return found


def test_every_key_is_read():
    assert set(schema().keys) - COMPUTED <= read()
