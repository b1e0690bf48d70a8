"""A journal of compilations: one JSON object per line, so that no question compiles a program twice."""

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

from trainer.aot.executable import source_of_step
from trainer.config.capabilities.all_keys import step_keys
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.runtime.versions import installed

JOURNAL = "plan.jsonl"  # in base_output_directory
Row = Mapping[str, Any]
_COMPILERS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def program_key(config: Config) -> str:
    """Returns a digest of everything that determines a compiled step: the keys of `config`, which is resolved, that
    affect the step, the topology, the versions, the trainer's source, and the variables that compilers read."""
    values = {key: config[key] for key in (*step_keys(), "compile_topology", "compile_topology_num_slices")}
    text = json.dumps([values, _surroundings()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.cache
def _surroundings() -> list[Any]:
    compilers = {name: metadata.version(name) for name in _COMPILERS if util.find_spec(name.replace("-", "_"))}
    variables = {name: os.environ.get(name, "") for name in _VARIABLES}
    return [dict(installed()), compilers, source_of_step(), variables]


class Journal:
    """The rows of a file by their key. A row is a dict with a `key`; later rows replace earlier ones."""

    def __init__(self, path: Path):
        """Reads `path` if it exists. Removes a last line without its end, which a killed process leaves.

        Raises:
          UserError: the file cannot be read or written, or a line is not a row.
        """
        self.path, self.rows = path, dict[str, Row]()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                os.truncate(path, len(whole))
        except OSError as error:
            raise UserError(f"journal={path}: cannot be read: {error.strerror}") from error
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                self.rows[row["key"]] = row
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"journal={path}: line {number} is not a row of a plan; give another file") from error

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
            raise UserError(f"journal={self.path}: cannot be written: {error.strerror}") from error
