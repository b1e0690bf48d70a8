"""The source files that a module depends on, by static analysis of its imports.

Imports are followed by name: for `from package import name`, only the module that defines `name` is followed, not the
other imports in the package's `__init__.py`. A string such as "package.module:Class" also counts as an import, because
registries import from such strings.
"""

import ast
import functools
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

_DOTTED = re.compile(r"(\w+(?:\.\w+)+)(?::\w+)?")


def digest(root: Path, modules: Iterable[str], belongs: Callable[[str], bool]) -> str:
    """Returns a digest of the names and contents of `source_files`."""
    total = hashlib.sha256()
    for file in source_files(root, modules, belongs):
        total.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return total.hexdigest()[:12]


def source_files(root: Path, modules: Iterable[str], belongs: Callable[[str], bool]) -> list[Path]:
    """Returns the files of `modules` and of all modules in `root` that they import directly or indirectly, sorted.

    Args:
      root: the folder that contains the top-level modules and packages.
      modules: dotted names.
      belongs: returns whether to follow imports from a top-level package, given its name; false for third-party
        packages.
    """
    imports = _Imports(root, belongs)
    for module in modules:
        imports.module(module)
    return sorted(imports.files)


class _Imports:
    """Follows imports and collects the files."""

    def __init__(self, root: Path, belongs: Callable[[str], bool]):
        self.root, self.belongs = root, belongs
        self.files: set[Path] = set()
        self._followed: set[str] = set()

    def module(self, module: str) -> None:
        """Adds a module and everything that it imports."""
        file = self._file(module)
        if file is None or module in self._followed:
            return
        self._followed.add(module)
        self.files.add(file)
        parts = module.split(".")
        packages = (self._file(".".join(parts[:depth])) for depth in range(1, len(parts)))
        # Importing a module first runs the __init__.py of each of its packages.
        self.files.update(package for package in packages if package is not None)
        for node in _nodes(file.read_bytes()):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self._name(_absolute(node, module, file), alias.name)
            elif isinstance(node, ast.Constant) and (dotted := _DOTTED.fullmatch(str(node.value))):
                self.module(dotted[1])

    def _name(self, module: str, name: str) -> None:
        """Adds the files that `from module import name` imports."""
        file = self._file(module)
        submodule = f"{module}.{name}"
        if file is not None and file.name == "__init__.py":
            self.files.add(file)
            if self._file(submodule) is not None:
                self.module(submodule)
                return
            for node in _nodes(file.read_bytes()):
                if not isinstance(node, ast.ImportFrom):
                    continue
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        self._name(_absolute(node, module, file), alias.name)
                        return
        self.module(module)  # `module` itself defines the name

    def _file(self, module: str) -> Path | None:
        if not self.belongs(module.partition(".")[0]):
            return None
        path = self.root.joinpath(*module.split("."))
        return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@functools.cache
def _nodes(code: bytes) -> list[ast.AST]:
    """Returns the imports and the constants in a file's code. A string constant may name a module to import."""
    return [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Import | ast.ImportFrom | ast.Constant)]


def _absolute(node: ast.ImportFrom, module: str, file: Path) -> str:
    """Returns the absolute name of the module from which `node`, an import in `module`, imports."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    package = parts[: len(parts) - node.level + (file.name == "__init__.py")]
    return ".".join([*package, *([node.module] if node.module else [])])
