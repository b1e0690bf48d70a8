"""The files of the package, for tests of what they promise."""

import ast
from pathlib import Path

import trainer

SOURCE = Path(trainer.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Dotted names of all that a file imports, at whatever depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names
