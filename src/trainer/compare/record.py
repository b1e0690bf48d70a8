"""A record contains the inputs and results of a comparison's left side, in one safetensors file.

The tensors are the batch, the starting parameters and state, the simulated later state (see `trainer.compare.midway`)
and the program's text. With `arrays=true`, every measured array is a tensor, too. The file's metadata contain two
texts. `record` is JSON with the configuration, the machine, a summary of every measured array, and a checksum of every
tensor. `digest` is the SHA-256 of this JSON. With these checksums, any changed byte is detected. A record may come from
a stranger, so nothing in it is executed.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError

from trainer.compare import measure
from trainer.compare.measure import Measured, Shared, Snapshot
from trainer.compare.reference import Reference, Step
from trainer.compare.summary import LayerSummary, Summary, digest, summarize
from trainer.config.dump import to_flow
from trainer.config.errors import UserError
from trainer.config.flags import combination
from trainer.config.keys import Config
from trainer.config.load import Loaded, load
from trainer.config.saved import read_saved
from trainer.config.schema import schema
from trainer.config.sides import Side
from trainer.data.batches import Batch
from trainer.runtime.versions import machine
from trainer.weights.huggingface.safetensors_file import NAMES, Tensors, file_metadata, header, stored_tensors

ENDING = ".safetensors"
_FORMAT = 1
# A tensor's name begins with one of these prefixes and ends with the canonical name of an array.
_BATCH, _PARAMS, _LATER, _MIDWAY, _ARRAYS = "batch/", "start parameters/", "start state/", "midway state/", "measured/"
_TEXT = "program text"


class Writer:
    """Writes a record. The file appears when the record is complete.

    A safetensors file begins with its header, but the checksums in the header are known only after all arrays. So the
    arrays are first written to a temporary file.
    """

    def __init__(self, path: Path, idle: Collection[str], *, arrays: bool):
        """`idle`: the keys that have no effect on a comparison. `arrays`: whether to keep the measured arrays.

        Raises:
          UserError: the file exists, or its folder does not exist.
        """
        if path.exists():
            raise UserError(f"record={path}: this file exists already; remove it, or give another name")
        if not path.absolute().parent.is_dir():
            raise UserError(f"record={path}: there is no folder {path.absolute().parent}")
        self._path, self._idle, self._arrays = path, idle, arrays
        with self._disk():
            self._spool = tempfile.TemporaryFile(dir=path.absolute().parent)  # noqa: SIM115
        self._tensors: Tensors = {}
        self._about: dict[str, Any] = {"format": _FORMAT, "tensors": {}, "measures": {}}

    def begin(self, left: Reference, side: Side) -> None:
        """Adds the inputs of the comparison."""
        config = side.loaded.config
        # Stores the resolved dtype, because dtype=auto depends on the platform.
        values = {name: config[name] for name in schema().keys if name not in self._idle} | {"dtype": left.config.dtype}
        self._about |= {
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "config": "".join(f"{name}: {to_flow(value)}\n" for name, value in values.items()),
            "given": sorted(_given(side.loaded).intersection(values) | {"dtype"}),
            "rows": left.rows,
            "microbatch": left.microbatch,
            "head": dict(left.head),
            "axes": {name: list(axes) for name, axes in left.axes.items()},
            "trained": left.snapshot.later is not None,
        }
        self._keep(_BATCH, left.batch)
        self._keep(_PARAMS, left.snapshot.params)
        self._keep(_LATER, left.snapshot.later or {})

    def add(self, left: Reference, step: Step, measured: Measured, known: Shared) -> None:
        """Adds the results of a measurement."""
        facts = dict(measured.facts)
        self._about["measures"][step.__name__] = {
            "quantities": {
                quantity: {name: _to_json(summarize(array, left.layers(name))) for name, array in arrays.items()}
                for quantity, arrays in measured.arrays.items()
            },
            "facts": facts,
        }
        if text := facts.pop(measure.TEXT, ""):
            self._keep("", {_TEXT: np.frombuffer(text.encode(), np.uint8)})
        self._keep(_MIDWAY, known.midway or {})
        if self._arrays:
            for quantity, arrays in measured.arrays.items():
                self._keep(f"{_ARRAYS}{quantity}/", arrays)

    def _keep(self, prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            with self._disk():
                self._spool.write(data.data)
            # An array whose dtype safetensors does not support is stored as bytes.
            shape, dtype = (array.shape, array.dtype) if array.dtype in NAMES else (data.shape, data.dtype)
            self._tensors[prefix + name] = shape, dtype
            self._about["tensors"][prefix + name] = digest(array), str(array.dtype), array.shape

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Writes the file if there was no error."""
        with self._spool:
            if kind is None:
                self._finish()

    def _finish(self) -> None:
        about = json.dumps(self._about)
        begin = header(self._tensors, {"record": about, "digest": _digest(about)})
        partial = self._path.with_name(f"{self._path.name}.partial")
        with self._disk():
            try:
                with partial.open("wb") as file:
                    file.write(begin)
                    self._spool.seek(0)
                    shutil.copyfileobj(self._spool, file, 1 << 24)
                partial.replace(self._path)
            finally:
                partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"record={self._path}: cannot be written: {error.strerror or error}") from error


class Record:
    """An opened record. A tensor is read, and its checksum verified, when it is needed."""

    def __init__(self, path: Path):
        """Opens the record at `path`. Raises UserError if the file is missing, not a record, or damaged."""
        self.path = path
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "a pipe, a socket or a device"
            raise UserError(f"left={path}: this is {kind}; give a record, FILE{ENDING}, or the name of a combination")
        try:
            metadata = file_metadata(path)
            self._tensors = stored_tensors(path)
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as a record: {error}") from error
        about = metadata.get("record", "")
        if not about:
            raise UserError(f"{path} is not a record; python -m trainer.parity ... record=FILE{ENDING} writes one")
        if metadata.get("digest") != _digest(about):
            raise self._damaged("its description")
        self._about = self._checked(lambda: json.loads(about))
        if self._checked(lambda: self._about["format"]) != _FORMAT:
            raise UserError(f"{path}: a record of another version of the trainer; record again with this version")
        if self._checked(lambda: self._about["tensors"].keys()) != self._tensors.keys():
            raise self._damaged("the names of its tensors")
        values = read_saved(self._checked(lambda: str(self._about["config"])), str(path))
        defaults = {key.name: key.default for key in schema().keys.values()}
        self._config = Config({**defaults, **values})
        given = self._checked(lambda: set(self._about["given"]))
        self.unknown = sorted(given - values.keys())  # keys that this version of the trainer lacks
        self.given = {name: value for name, value in values.items() if name in given}  # for `config.sides.load_against`

    @property
    def rows(self) -> int:
        """The number of rows of the batch."""
        return self._checked(lambda: int(self._about["rows"]))

    @property
    def has_arrays(self) -> bool:
        """Whether the record was written with `arrays=true`."""
        return any(name.startswith(_ARRAYS) for name in self._tensors)

    def side(self) -> Side:
        """Returns the recorded side."""
        return Side(self.path.name, (), Loaded(self._config, {}, {}, [], []))

    @property
    def head(self) -> list[tuple[str, str]]:
        """Labels and texts that describe the recorded program, the machine on which it was recorded, and how this
        machine differs from that machine."""
        about, here = self._about, machine()
        there = self._checked(lambda: {str(name): str(value) for name, value in about["machine"].items()})
        rows = [("recorded", f"{about.get('date')}, {combination(self._config)}, {_machine(there)}")]
        if other := {name: value for name, value in here.items() if there.get(name) != value}:
            rows.append(("here", _machine(other)))
        return rows

    def reference(self) -> Reference:
        """Returns the recorded side as the reference of a comparison.

        Raises:
          UserError: the record is damaged.
        """
        about = self._about
        return self._checked(
            lambda: Reference(
                name=self.path.name,
                config=self._config,
                rows=self.rows,
                microbatch=int(about["microbatch"]),
                head={str(label): str(text) for label, text in about["head"].items()},
                axes={name: tuple(axes) for name, axes in about["axes"].items()},
                snapshot=self._snapshot(),
                batch=self._arrays(_BATCH),
                layers=lambda name: None,  # each summary contains its layer numbers
                measured=self._measured,
                recorded=True,
            )
        )

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._arrays(_PARAMS), self._arrays(_LATER) if self._about["trained"] else None)

    def _measured(self, step: Step, part: Batch, known: Shared) -> Measured:
        del part
        return self._checked(lambda: self._recorded(step, known))

    def _recorded(self, step: Step, known: Shared) -> Measured:
        measured = self._about["measures"][step.__name__]
        arrays = {
            quantity: {name: self._summary(f"{_ARRAYS}{quantity}/{name}", entry) for name, entry in entries.items()}
            for quantity, entries in measured["quantities"].items()
        }
        facts: dict[str, Any] = {name: float(fact) for name, fact in measured["facts"].items()}
        if step is measure.update:
            known.midway = None if self._about["trained"] else self._arrays(_MIDWAY)
            facts = {measure.TEXT: self._read(_TEXT).tobytes().decode(), **facts}
        return Measured(arrays, facts)

    def _summary(self, tensor: str, entry: Mapping[str, Any]) -> Summary:
        parts = tuple(
            LayerSummary(str(digest), float(most), float(rms), int(odd)) for digest, most, rms, odd in entry["parts"]
        )
        layers = None if entry["layers"] is None else tuple(map(int, entry["layers"]))
        if len(parts) != (1 if layers is None else len(layers)):
            raise ValueError("layers")
        read = functools.partial(self._read, tensor) if tensor in self._tensors else None
        return Summary(tuple(map(int, entry["shape"])), str(entry["dtype"]), layers, parts, read)

    def _arrays(self, prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): self._read(name) for name in self._tensors if name.startswith(prefix)}

    def _read(self, name: str) -> np.ndarray:
        expected, dtype, shape = self._about["tensors"][name]
        if np.dtype(dtype).hasobject:
            raise ValueError(dtype)
        array = self._tensors[name].all_values().reshape(-1).view(np.dtype(dtype)).reshape(shape)
        if digest(array) != expected:
            raise self._damaged(name)
        return array

    def _checked(self, read: Callable[[], Any]) -> Any:
        """Returns `read()`. If missing or wrong entries of the record's JSON cause an error, raises UserError
        instead."""
        try:
            return read()
        except UserError:  # UserError is a ValueError
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise self._damaged(f"its description ({type(error).__name__}: {error})") from error

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self.path}: this record is damaged: {what}; copy it again, or record again")


def _given(loaded: Loaded) -> set[str]:
    """Returns the keys that the recorded command sets: on the command line, in a yml, or through MaxText's defaults."""
    config = loaded.config
    plain = load(["base.yml", f"model_name={config.model_name}"], imports=False).config
    return {name for name in schema().keys if name in loaded.changed or config[name] != plain[name]}


def _to_json(summary: Summary) -> dict[str, Any]:
    return {"shape": summary.shape, "dtype": summary.dtype, "layers": summary.layers, "parts": summary.parts}


def _machine(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value or 'not set'}" for name, value in facts.items() if value or name != "XLA_FLAGS")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
