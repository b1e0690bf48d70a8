"""Promises about the Linen room: nobody else imports Linen, and it is small enough to be deleted in one commit."""

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


def test_linen_is_imported_in_its_room_only():
    linen = {path for path in FILES if any(n.startswith(("flax.linen", "flax.training")) for n in imported(path))}
    assert linen
    assert {path.relative_to(SOURCE).parts[0] for path in linen} == {"linen"}


def test_the_linen_room_is_small():
    assert sum(len(path.read_text().splitlines()) for path in (SOURCE / "linen").glob("*.py")) < 600
