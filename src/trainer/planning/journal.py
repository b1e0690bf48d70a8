"""A journal of compilations, one JSON object per line, so that a program is never compiled twice."""

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

import trainer
from trainer.aot import sources
from trainer.aot.executable import settings, source_of_block
from trainer.config.capabilities.all_keys import step_keys
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.runtime.versions import installed

Row = Mapping[str, Any]
_COMPILERS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_BEGIN = b'{"key": "'  # the beginning of every line
_FIELDS: dict[str, Any] = {
    "key": str,
    "outcome": str,
    "reason": str,
    "report": dict,
    "wall_seconds": (int, float),
    "again": bool,
}


def default_path(config: Config) -> Path:
    """Returns the journal's path in base_output_directory. Raises UserError if base_output_directory is not a local
    folder."""
    if "://" in config.base_output_directory:
        raise UserError(f"base_output_directory={config.base_output_directory}: give journal=FILE, a local file")
    return local_path(config.base_output_directory, "base_output_directory=") / "plan.jsonl"


def program_key(config: Config) -> str:
    """Returns a digest of everything that determines a compiled step and its report.

    The digest covers the topology, the versions of packages, the source files, JAX's settings, the environment
    variables that compilers read, and the keys of `config` (resolved) that affect the step.
    """
    values = {key: config[key] for key in (*step_keys(), "compile_topology", "compile_topology_num_slices")}
    text = json.dumps([values, source_of_block(config), _surroundings()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.cache
def _surroundings() -> list[Any]:
    compilers = {name: metadata.version(name) for name in _COMPILERS if util.find_spec(name.replace("-", "_"))}
    variables = {name: os.environ.get(name, "") for name in _VARIABLES}
    source = sources.digest(Path(trainer.__file__).parents[1], ["trainer.train_compile"], lambda top: top == "trainer")
    return [dict(installed()), compilers, source, variables, settings()]


class Journal:
    """The rows of a journal file, by `program_key`. A row is a dict with this digest, `key`, as its first item.

    If several rows have the same key, the last one counts.
    """

    def __init__(self, path: Path):
        """Reads `path` if it exists. Ignores incomplete lines, which killed processes may leave.

        Raises:
          UserError: the file cannot be read or written, or a line is not a row.
        """
        self.path, self.rows = path, dict[str, Row]()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
            for number, line in enumerate(content.removesuffix(b"\n").split(b"\n") if content else [], 1):
                self._read(number, line)
            with path.open("ab") as file:
                file.write(b"" if not content or content.endswith(b"\n") else b"\n")  # ends an incomplete line
        except OSError as error:
            raise UserError(f"the journal {path}: {error.strerror}; give another journal=FILE") from error

    def add(self, row: Row) -> None:
        """Appends a row with one write, so that several plans can share the file.

        Raises:
          UserError: the file cannot be written.
        """
        self.rows[row["key"]] = row
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(row).encode() + b"\n")
        except OSError as error:
            raise UserError(f"the journal {self.path}: {error.strerror}") from error

    def _read(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if line and line[: len(_BEGIN)] == _BEGIN[: len(line)]:
                return  # incomplete
            row = None
        if not isinstance(row, dict) or not all(isinstance(row.get(name), kind) for name, kind in _FIELDS.items()):
            raise UserError(f"the journal {self.path}: line {number} is not a row of a plan; give another journal=FILE")
        self.rows[row["key"]] = row
