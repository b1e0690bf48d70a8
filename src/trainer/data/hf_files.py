"""Handles text files that the `datasets` library cannot read.

A line that is not UTF-8 is reported. Files with lone surrogates are read from repaired copies.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError
from trainer.data import cache
from trainer.data.text import encoding_hint, mended

# Matches an escaped surrogate pair, an escaped lone surrogate (group 1), or any other escape. The last alternative
# consumes escaped backslashes, so that "ud83d" after one is not mistaken for an escape.
_ESCAPES = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)
_KINDS = ("csv", "json", "text")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar")


def mended_table(datasets: Any, load: Mapping[str, Any], folder: Path, say: Callable[[str], None]) -> Any:
    """Returns the table that `datasets.load_dataset(**load)` failed to load, with each lone surrogate replaced by
    U+FFFD.

    The readers of `datasets` reject lone surrogates, so repaired copies of the files are written into `folder`, and the
    table is read from the copies. Returns None if the files have no lone surrogates, are compressed, or have a format
    other than csv, json and text.

    Raises UserError for the first line that is not UTF-8.
    """
    try:
        builder = datasets.load_dataset_builder(**{name: value for name, value in load.items() if name != "split"})
    except (OSError, ValueError, datasets.exceptions.DatasetsError):
        return None
    kind, config = type(builder).__module__.rpartition(".")[2], builder.config
    splits = {name: [Path(file) for file in files] for name, files in (config.data_files or {}).items()}
    files = [file for some in splits.values() for file in some]
    if kind not in _KINDS or any(not file.is_file() or file.suffix in _PACKED for file in files):
        return None
    counts = [_lone_surrogates(file, kind) for file in files]
    total = sum(count for count, _ in counts)
    if not total:
        return None

    def build(temporary: Path) -> dict[str, Any]:
        for i, file in enumerate(files):
            with (temporary / str(i)).open("wb") as copy:
                copy.writelines(line for line, _ in _lines(file, kind))
        return {}

    facts = [kind, *((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)]
    copied = folder / f"mended-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"
    cache.ensure(copied, build, say)
    where = next(where for count, where in counts if count)
    say(f"lone surrogates are replaced by U+FFFD: {total:,} in {len(files):,} files, the first in {where}")
    numbers = itertools.count()
    copies = {name: [str(copied / str(next(numbers))) for _ in some] for name, some in splits.items()}
    settings = {"split": load["split"], "cache_dir": load["cache_dir"], **_settings(datasets, config)}
    return datasets.load_dataset(kind, data_files=copies, **settings)


def _settings(datasets: Any, config: Any) -> dict[str, Any]:
    """Returns the format-specific settings of a builder's configuration that differ from their defaults."""
    common, default = {field.name for field in fields(datasets.BuilderConfig)}, type(config)()
    own = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in common}
    return {name: value for name, value in own.items() if value != getattr(default, name)}


def _lone_surrogates(file: Path, kind: str) -> tuple[int, str]:
    """Returns the number of lone surrogates in a file, and the file and line of the first one, as text."""
    total, first = 0, ""
    for number, (_, count) in enumerate(_lines(file, kind), 1):
        first = first or (f"{file}, line {number}" if count else "")
        total += count
    return total, first


def _lines(file: Path, kind: str) -> Iterator[tuple[bytes, int]]:
    """Replaces the lone surrogates in a file, and yields a pair for each line: the new line and the number of
    replacements.

    Raises UserError for a line that is not UTF-8.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text, count = mended(line.decode("utf-8", "surrogatepass"))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{file}, line {number}, is not UTF-8 at byte {error.start}{encoding_hint(line)}; convert the "
                    "file, or remove the line"
                ) from error
            data = text.encode()
            if kind == "json":
                count += sum(bool(match[1]) for match in _ESCAPES.finditer(data))
                data = _ESCAPES.sub(lambda match: rb"\ufffd" if match[1] else match[0], data)
            yield data, count
