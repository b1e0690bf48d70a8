"""Saved logits of a teacher for the rows of one prepared data set, in the stored order of the rows.

A folder contains the file MANIFEST and the shards. A shard consists of the records of a fixed number of rows (fewer in
the last shard), without a header. The manifest lists the SHA-256 of each complete shard, so that a restarted command
makes only the missing shards.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from trainer.config.errors import UserError
from trainer.config.json_files import Field, field_problems, read_object
from trainer.config.paths import local_path
from trainer.data.batches import Batch, RowSource
from trainer.data.dataset import Dataset
from trainer.data.streams import fingerprint
from trainer.objectives.saved_logits import LOGITS, TOKENS, saved_fields
from trainer.runtime.folders import replace_file
from trainer.runtime.lock import LOCK_FILE, lock
from trainer.runtime.new_folder import new_file

MANIFEST, PATH = "teacher-logits.json", "teacher_logits_path"
FORMAT = 1
_MOST_SHARDS = 1_000_000
SHARD_BYTES = 64 << 20  # the approximate size of a shard; a larger batch is a shard of its own
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
_FIELDS = {
    **{"format": Field(int, FORMAT, FORMAT), "data": Field(str), "teacher": Field(str), "dtype": Field(str)},
    **{name: Field(int, 1) for name in ("rows", "length", "k", "vocab_size", "tokens", "shard_rows")},
    **{"temperature": Field(float, 0), "teacher_path": Field(str), "shards": Field(dict)},
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A description of the shards in a folder.

    Attributes:
      data: a hash of the rows (`hash_of_rows`).
      rows, length: the number of rows, and the number of tokens in each row.
      k, vocab_size: the number of logits saved for each position, and the size of the teacher's vocabulary.
      tokens: the student also has the first `tokens` tokens of the teacher's vocabulary. If k < vocab_size, the others
        are ignored.
      temperature: the temperature at which the field `teacher_others` is computed (`trainer.objectives.saved_logits`).
      dtype: the dtype of the logits.
      teacher: a hash of the teacher's weights.
      shard_rows: the number of rows of each shard except the last.
    """

    data: str
    rows: int
    length: int
    k: int
    vocab_size: int
    tokens: int
    temperature: float
    dtype: str
    teacher: str
    shard_rows: int = 0

    @property
    def whole(self) -> bool:
        """Whether the logits of all tokens of the vocabulary are saved."""
        return self.k == self.vocab_size

    @property
    def record(self) -> np.dtype:
        """The structured dtype of a row's record. Its fields have the names of the fields in a batch."""
        fields = saved_fields(self.k, self.vocab_size, self.dtype)
        return np.dtype(
            [
                (name, _DTYPES.get(field.dtype, field.dtype), (self.length, *field.shape[2:]))
                for name, field in fields.items()
            ]
        )

    def check(self) -> None:
        """Raises UserError if the record of a row is larger than NumPy allows."""
        fields = saved_fields(self.k, self.vocab_size, self.dtype)
        each = sum(math.prod(map(int, field.shape[2:])) * 4 for field in fields.values()) * self.length
        if each >= 1 << 31:
            raise UserError(
                f"the logits of a row of {self.length} tokens take up to {each:,} bytes, and at most {(1 << 31) - 1:,} "
                "can be saved; use a smaller teacher_logits_k or max_target_length"
            )

    def bounds(self) -> dict[str, range]:
        """Returns a dict from each shard's file name to the indices of its rows."""
        firsts = range(0, self.rows, self.shard_rows)
        return {f"shard-{i:06}": range(a, min(a + self.shard_rows, self.rows)) for i, a in enumerate(firsts)}


def rows_of(dataset: Dataset, key: str) -> tuple[RowSource, int]:
    """Returns the training rows of `dataset`, and their number. Raises UserError if the rows have no fixed order."""
    if dataset.source is None or dataset.source.size is None:
        raise UserError(
            f"{key}: logits belong to the rows of one prepared data set; mixtures, streamed and synthetic rows have no "
            "stored order"
        )
    return dataset.source, dataset.source.size


def hash_of_rows(dataset: Dataset) -> str:
    """Returns a hash that is equal for equal training rows, even if they are trained in different orders."""
    return fingerprint({name: value for name, value in dataset.identity.items() if name != "order"})


class SavedLogits:
    """A complete folder of a teacher's logits. Each shard is verified when it is first read."""

    def __init__(self, path: str):
        """Raises UserError if the folder is incomplete, or a shard has the wrong size."""
        self.folder = local_path(path, f"{PATH}=")
        self.facts, self._sums = _read(self.folder)
        bounds, self._verified = self.facts.bounds(), set[str]()
        self._names = [*bounds]
        if missing := [name for name in bounds if name not in self._sums]:
            raise UserError(
                f"{PATH}={path}: {len(missing)} of {len(bounds)} shards are not saved yet; run the command with "
                "save_teacher_logits again"
            )
        for name, rows in bounds.items():
            file, size = self.folder / name, len(rows) * self.facts.record.itemsize
            if not file.is_file() or file.stat().st_size != size:
                raise _damaged(file, f"does not have {size} bytes")

    @property
    def identity(self) -> str:
        """A hash that is equal for equal logits, even in different folders."""
        return fingerprint(dataclasses.asdict(self.facts) | {"shards": self._sums})

    def rows(self, indices: np.ndarray) -> Batch:
        """Returns a batch with the saved logits of the rows at `indices` [n].

        Raises UserError if a shard is damaged.
        """
        shards, within = np.divmod(indices, self.facts.shard_rows)
        records = np.empty(len(indices), self.facts.record)
        for shard in np.unique(shards):
            here = shards == shard
            records[here] = self._shard(self._names[shard])[within[here]]
        return {name: np.ascontiguousarray(records[name]) for name in self.facts.record.names or ()}

    def _shard(self, name: str) -> np.ndarray:
        # The memory map is not kept, because each holds a file descriptor, and there may be thousands of shards.
        file = self.folder / name
        try:
            if name not in self._verified:
                with file.open("rb") as opened:
                    found = hashlib.file_digest(opened, "sha256").hexdigest()
                if found != self._sums[name]:
                    raise _damaged(file, "has changed since it was written")
            records = np.memmap(file, self.facts.record, mode="r")
        except OSError as error:
            raise UserError(f"{PATH}: {file} cannot be read: {error.strerror or error}") from error
        if name not in self._verified and not self.facts.whole and _unknown(records[TOKENS], self.facts.tokens):
            raise _damaged(file, "has token ids outside of the vocabulary")
        self._verified.add(name)
        return records


def _unknown(ids: np.ndarray, count: int) -> bool:
    return bool(ids.size) and not 0 <= int(ids.min()) <= int(ids.max()) < count


class _WithLogits:
    """Rows with the saved logits of a teacher."""

    def __init__(self, source: RowSource, saved: SavedLogits):
        self.size, self.length, self._source, self._saved = source.size, source.length, source, saved

    def rows(self, indices: np.ndarray) -> Batch:
        """Returns the rows at `indices` [n] as a batch (see `trainer.data.batches`) without the entry `row`."""
        return {**self._source.rows(indices), **self._saved.rows(indices)}


def with_logits(dataset: Dataset, path: str) -> Dataset:
    """Returns `dataset` with the logits from the folder `path` added to its training batches.

    Raises:
      UserError: the folder belongs to other rows.
    """
    (source, size), saved = rows_of(dataset, PATH), SavedLogits(path)
    here = {"data": hash_of_rows(dataset), "rows": size, "length": source.length}
    there = dataclasses.asdict(saved.facts)
    if changed := [
        f"{name} is {there[name]} in the folder, {now} in this run" for name, now in here.items() if there[name] != now
    ]:
        raise UserError(
            f"{PATH}={path}: the logits belong to other rows ({', '.join(changed)}); use the data, the tokenizer and "
            "the packing of the command that saved them"
        )
    identity = dataset.identity | {"logits": saved.identity}
    return dataclasses.replace(dataset, source=_WithLogits(source, saved), identity=identity)


@contextlib.contextmanager
def writer(path: str, facts: Facts, teacher_path: str) -> Iterator[tuple[dict[str, range], Callable[..., None]]]:
    """Creates the folder `path`, or continues an incomplete one. Yields a dict from the file name of each missing shard
    to the indices of its rows, and a function `write(name, batches)`, which writes the shard `name`. Each batch is a
    dict of arrays [n, ...]; together, the batches contain the rows of the shard in order.

    Raises:
      UserError: the folder has other logits or other files, another process writes to it, or it cannot be written.
    """
    folder = local_path(path, "save_teacher_logits=")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (held := lock(folder)) is None:
            raise UserError(f"save_teacher_logits={path}: another process is writing there")
        with held:
            facts, sums = _begun(folder, facts)
            bounds = facts.bounds()

            def save() -> None:
                found = {"format": FORMAT, **dataclasses.asdict(facts), "teacher_path": teacher_path, "shards": sums}
                replace_file(folder / MANIFEST, json.dumps(found, indent=1) + "\n")

            def write(name: str, batches: Iterator[Mapping[str, np.ndarray]]) -> None:
                digest = hashlib.sha256()
                with new_file(folder / name) as partial, partial.open("xb") as file:
                    for batch in batches:
                        records = np.empty(len(batch[LOGITS]), facts.record)
                        for field in facts.record.names or ():
                            records[field] = batch[field]
                        content = records.view(np.uint8).data
                        digest.update(content)
                        file.write(content)
                sums[name] = digest.hexdigest()
                save()

            save()
            yield {name: rows for name, rows in bounds.items() if name not in sums}, write
    except OSError as error:
        raise UserError(
            f"save_teacher_logits={path}: cannot be written: {error.strerror or error}; complete shards are kept: run "
            "the same command again to continue"
        ) from error


def _begun(folder: Path, facts: Facts) -> tuple[Facts, dict[str, str]]:
    """Returns `facts`, and a dict from the name of each complete shard to its SHA-256. If an earlier command began the
    folder, the returned facts have the shard size of that command, and incomplete shards are removed."""
    if not os.path.lexists(folder / MANIFEST):
        if any(path.name != LOCK_FILE for path in folder.iterdir()):
            raise UserError(f"save_teacher_logits={folder}: has other files; choose a new folder")
        return facts, {}
    before, sums = _read(folder)
    facts = dataclasses.replace(facts, shard_rows=before.shard_rows)
    then, now = dataclasses.asdict(before), dataclasses.asdict(facts)
    if changed := [f"{name} {then[name]} -> {now[name]}" for name in now if then[name] != now[name]]:
        raise UserError(
            f"save_teacher_logits={folder}: has logits of another command (old -> new): {', '.join(changed)}; choose "
            "a new folder"
        )
    for leftover in folder.glob("shard-*.incomplete-*"):
        leftover.unlink()
    size, bounds = facts.record.itemsize, facts.bounds()
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    return facts, {name: total for name, total in sums.items() if files.get(name) == len(bounds[name]) * size}


def _read(folder: Path) -> tuple[Facts, dict[str, str]]:
    """Returns the content of the manifest: the `Facts`, and a dict from the name of each complete shard to its
    SHA-256."""
    found = read_object(folder / MANIFEST)
    problems = [f"{name} is missing" for name in _FIELDS if name not in found] or field_problems(found, _FIELDS)
    if not problems:
        k, tokens, vocabulary = found["k"], found["tokens"], found["vocab_size"]
        if found["dtype"] not in _DTYPES or tokens > vocabulary or (k > tokens and k != vocabulary):
            problems = [f"dtype={found['dtype']}, {k=}, {tokens=}, vocab_size={vocabulary}"]
    if not problems and found["rows"] > _MOST_SHARDS * found["shard_rows"]:
        problems = [f"rows={found['rows']}, shard_rows={found['shard_rows']}"]
    if problems:
        raise UserError(f"{folder / MANIFEST} is damaged: {'; '.join(problems)}; delete the folder, and save again")
    facts = Facts(**{field.name: found[field.name] for field in dataclasses.fields(Facts)})
    facts.check()
    names = facts.bounds()
    return facts, {name: str(total) for name, total in found["shards"].items() if name in names}


def _damaged(file: Path, what: str) -> UserError:
    return UserError(f"{PATH}: {file} {what}; delete it, and run the command with save_teacher_logits again")
