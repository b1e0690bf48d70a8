"""Describes the contents of checkpoints of any kind to users."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.backends.registry import make_model
from trainer.checkpoint.manager import RUN, inspect, newest, written_by_maxtext
from trainer.checkpoint.sidecar import read_sidecar, saved_config
from trainer.config.errors import UserError
from trainer.config.paths import local_path
from trainer.leaves import orbax
from trainer.leaves.source import Leaf
from trainer.models.families import in_stack
from trainer.runtime import storage
from trainer.weights.huggingface.read import CONFIG
from trainer.weights.huggingface.safetensors_file import StoredTensor
from trainer.weights.huggingface.weight_files import tensors_in
from trainer.weights.maxtext.read import MaxTextSource
from trainer.weights.model_keys import model_config
from trainer.weights.open import open_source, weights_of
from trainer.weights.params.read import TREE, ParamsSource

SAFETENSORS = ".safetensors"
PARAMS, REST, ISLANDS = "params", "rest", "inner_state"
_STRIP = 1 << 22  # the number of values to square at once


@dataclass(frozen=True)
class Tensor:
    """One array of a checkpoint.

    Attributes:
      part: the part of the checkpoint: params, opt_state, step, ... With DiLoCo, the parts of the islands' states begin
        with inner_state/.
      name: the canonical name of a parameter; for other arrays, the path below `part`.
      dtype: the NumPy name; several names joined by + if layers are stored in several dtypes.
      read: yields the values in one or more parts; the layers of a stack are in order.
      stacked: whether the first axis is the axis of layers.
    """

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    read: Callable[[], Iterable[np.ndarray]]
    stacked: bool = False

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    def norms(self) -> list[float]:
        """Returns the Euclidean norm of each layer of a stack; for other arrays, a list with one norm. Sums of squares
        are float64."""
        squares: list[float] = []
        for part in self.read():
            pieces = part if self.stacked and part.ndim == len(self.shape) else [part]
            squares += [_square(piece) for piece in pieces]
        return [math.sqrt(it) for it in (squares if self.stacked else [sum(squares)])]


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint. Only the arrays' headers are read.

    Attributes:
      path: the checkpoint; for a run's folder, its newest checkpoint.
      kind: a description in words.
      step: the number of updates; None if the checkpoint does not record it.
      keys: the configuration keys in the checkpoint.
      verified: whether checksums were compared; None if the checkpoint has no checksums.
      position: the position in the data, JSON; None if the checkpoint does not record it.
      fingerprint: the fingerprint of the data and the tokenizer.
      tokenizer: names of the tokenizer's files.
      notes: remarks on how the checkpoint is stored.
    """

    path: str
    kind: str
    step: int | None
    keys: Mapping[str, Any]
    tensors: list[Tensor]
    verified: bool | None = None
    position: Any = None
    fingerprint: str = ""
    tokenizer: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def contents_of(path: str, *, verify: bool = True) -> Contents:
    """Returns the contents of the checkpoint at `path`. Recognizes its kind as `open_source` does.

    Args:
      path: a run's folder, checkpoints/N, a parameter-only checkpoint, a MaxText checkpoint, a Hugging Face directory,
        a GGUF file, or one .safetensors file.
      verify: whether to compare the checksums of a run's checkpoint, which reads all of it.

    Raises:
      UserError: there is no checkpoint, or it is damaged.
    """
    if path.endswith(SAFETENSORS) and "://" not in path and (file := local_path(path)).is_file():
        return _of_file(file)
    checkpoint = newest(storage.folder(path))
    if checkpoint is not None and not written_by_maxtext(checkpoint):
        return _of_run(checkpoint, verify)
    source = open_source(path)
    if isinstance(source, MaxTextSource):
        return _of_maxtext(source)
    if isinstance(source, ParamsSource):
        tensors = _in_tree(source.path / TREE)
        return Contents(str(source.path), "parameters only, from trainer.export", None, source.keys, tensors)
    config = model_config(source.keys, [], str(source.path))
    shapes, buffers = weights_of(make_model(config))
    leaves = source.leaves(config, shapes)
    found = [_of_leaf(REST if name in buffers else PARAMS, name, leaf) for name, leaf in leaves.items()]
    kind = f"a {source.kind} {'file' if source.path.is_file() else 'directory'}"
    return Contents(str(source.path), kind, None, source.keys, found, notes=tuple(source.notes(config)))


def _of_run(checkpoint: Any, verify: bool) -> Contents:
    sidecar = inspect(checkpoint) if verify else read_sidecar(checkpoint / RUN)
    tensors = _in_tree(checkpoint)
    notes: tuple[str, ...] = ()
    if sidecar.base is not None:
        notes = (f"adapters, without their base: {sidecar.base.path or 'the initial parameters of the run'}",)
    islands = any(tensor.part.startswith(ISLANDS) for tensor in tensors)
    return Contents(
        str(checkpoint),
        f"a checkpoint of a {'DiLoCo ' if islands else ''}run",
        int(checkpoint.name) if checkpoint.name.isdecimal() else None,
        saved_config(sidecar, f"{checkpoint}/{RUN}"),
        tensors,
        verify,
        sidecar.position,
        sidecar.fingerprint,
        tuple(sorted(sidecar.tokenizer)),
        notes,
    )


def _of_file(file: Path) -> Contents:
    tensors = [
        Tensor(PARAMS, name, it.shape, _dtype_of(it), it.nbytes, functools.partial(_all_of, it))
        for name, it in tensors_in(file, file).items()
    ]
    if not tensors:
        raise UserError(f"{file} contains no tensors")
    notes = ["names are as stored in the file, which has no configuration"]
    if (file.parent / CONFIG).is_file():
        notes.append(f"{file.parent} has a config.json: inspect that folder for the model")
    return Contents(str(file), "a safetensors file", None, {}, tensors, notes=tuple(notes))


def _all_of(tensor: StoredTensor) -> list[np.ndarray]:
    return [tensor.all_values()]


def _dtype_of(tensor: StoredTensor) -> str:
    dtype = tensor.shown_dtype
    return tensor.kind if dtype is None else dtype.name


def _of_maxtext(source: MaxTextSource) -> Contents:
    parameters = {path: name for name, path in source.stored.items()}
    headers, readers = orbax.headers(source.path), orbax.readers(source.path)
    tensors = []
    for path, header in headers.items():
        part, name = (PARAMS, parameters[path]) if path in parameters else _split(path)
        tensors.append(_tensor(part, name, header, readers[path], stacked=False))
    steps = [tensor for tensor in tensors if tensor.part == "step" and not tensor.shape]
    step = int(next(iter(steps[0].read()))) if steps else None
    notes = ("names, layers and the layers axis are as MaxText stores them; the checkpoint has no configuration",)
    return Contents(str(source.path), "a MaxText checkpoint", step, {}, tensors, notes=notes)


def _in_tree(tree: Any) -> list[Tensor]:
    """Returns the arrays of an Orbax tree that this trainer wrote."""
    readers = orbax.readers(tree)
    found = []
    for path, header in orbax.headers(tree).items():
        part, name = _split(path)
        if part == ISLANDS:
            inner, name = _split(name)
            part = f"{ISLANDS}/{inner}"
        found.append(_tensor(part, name, header, readers[path], stacked=part == PARAMS and in_stack(name)))
    return found


def _split(path: str) -> tuple[str, str]:
    part, _, name = path.partition("/")
    return part, name


def _tensor(part: str, name: str, header: Any, read: Callable[[], np.ndarray], *, stacked: bool) -> Tensor:
    dtype, shape = np.dtype(header.dtype), tuple(header.shape)
    return Tensor(
        part, name, shape, dtype.name, math.prod(shape) * dtype.itemsize, lambda: [np.asarray(read())], stacked
    )


def _of_leaf(part: str, name: str, leaf: Leaf) -> Tensor:
    dtype = "+".join(leaf.mixed) or leaf.dtype.name
    return Tensor(part, name, leaf.shape, dtype, leaf.nbytes, functools.partial(_parts, leaf), in_stack(name))


def _parts(leaf: Leaf) -> Iterator[np.ndarray]:
    for part in leaf.parts:
        yield part()


def _square(value: np.ndarray) -> float:
    """Returns the sum of the squares of all values, computed in strips."""
    flat = np.ascontiguousarray(value).reshape(-1)
    total = 0.0
    for start in range(0, len(flat), _STRIP):
        strip = flat[start : start + _STRIP].astype(np.float64)
        total += float(strip @ strip)
    return total
