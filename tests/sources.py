"""The source files of the package, for tests of properties of the source."""

import ast
import functools
from pathlib import Path

import trainer

SOURCE = Path(trainer.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Returns the module of a file and all nodes below it."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Returns the dotted names of everything that a file imports, at any depth."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)
