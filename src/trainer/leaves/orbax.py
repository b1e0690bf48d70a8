"""Reads and writes Orbax trees leaf by leaf."""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.config.errors import UserError
from trainer.config.json_files import read_object
from trainer.leaves.source import names_of, nested, put_slices
from trainer.ops.paths import name_of
from trainer.runtime.storage import absolute, entries

COMPOSITE = "_CHECKPOINT_METADATA"  # a file next to the trees of a checkpoint with several items
_TREE = "_METADATA"  # a file in each tree
_CHUNK = 1 << 31  # bytes per chunk; a process that needs a slice of an array reads only the chunks that overlap it
_TOGETHER = 1 << 25  # bytes to buffer before a write
_SMALL = 1 << 16  # bytes of a leaf that is read together with others

ITEMS = "items"  # the name of the tree in a MaxText checkpoint


def headers(path: Path) -> dict[str, Any]:
    """Returns a dict from the slash-separated path of each leaf of an Orbax tree to an object with the leaf's shape and
    dtype.

    Raises:
      UserError: the tree is damaged, or parts of it are missing.
    """
    from orbax.checkpoint import v1 as ocp

    def as_dict(node: Any) -> Any:
        if isinstance(node, list | tuple):
            node = dict(enumerate(node))
        return {str(key): as_dict(child) for key, child in node.items()} if isinstance(node, Mapping) else node

    with _undamaged(path):
        for file in (path / _TREE, *(entry / _TREE for entry in entries(path))):
            if file.exists():
                read_object(file)
        tree = ocp.metadata(**_address(path)).metadata
        if tree is None:
            raise ValueError("its metadata or arrays cannot be read")
    flat = names_of(as_dict(tree))
    return {name: leaf for name, leaf in flat.items() if hasattr(leaf, "shape")}


def custom_metadata(path: Path) -> dict[str, Any]:
    """Returns the custom metadata of the checkpoint that contains the Orbax tree `path`; {} if it has none.

    Raises:
      UserError: the metadata file is damaged.
    """
    file = path.parent / COMPOSITE
    found = read_object(file).get("custom_metadata") if file.exists() else None
    return found if isinstance(found, dict) else {}


def _address(path: Path) -> dict[str, Any]:
    """Returns the arguments with which Orbax opens the tree at `path`.

    Orbax refuses the path of a tree that is part of a checkpoint; it needs the checkpoint's path and the tree's name.
    """
    if (path / _TREE).exists() and (path.parent / COMPOSITE).exists():
        return {"path": absolute(path.parent), "checkpointable_name": path.name}
    return {"path": absolute(path)}


def readers(path: Path) -> dict[str, Callable[[], np.ndarray]]:
    """Returns a dict from the path of each leaf of an Orbax tree (as in `headers`) to a function that reads the leaf
    onto the host.

    Raises:
      UserError: the tree is damaged. The returned functions can raise this error, too.
    """
    from orbax.checkpoint import v1 as ocp

    headers(path)  # reports damage
    with _undamaged(path):
        found, structure = _flattened(ocp.metadata(**_address(path)).metadata)

    def reader(i: int, name: str, leaf: Any) -> np.ndarray:
        wanted: list[Any] = [ocp.PLACEHOLDER] * len(found)
        wanted[i] = np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
        with _undamaged(path, name):
            return jax.tree.leaves(ocp.load(abstract_state=structure.unflatten(wanted), **_address(path)))[i]

    return {name: functools.partial(reader, i, name, leaf) for i, (name, leaf) in enumerate(found)}


def _flattened(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [(name_of(path), leaf) for path, leaf in leaves], structure


class Tree:
    """Reads an Orbax tree leaf by leaf.

    At each read, Orbax spends time on every leaf of the tree: 60 ms if there are 800. Therefore the small leaves are
    read together, when the first of them is needed.
    """

    def __init__(self, path: Path, leaves: Mapping[str, Any]):
        """`leaves`: from the path of each leaf that may be read to its shape and dtype, as `headers` returns them."""
        self.path = path
        self._on_host = {
            name: np.broadcast_to(np.zeros((), leaf.dtype), tuple(leaf.shape)) for name, leaf in leaves.items()
        }

    @functools.cached_property
    def _small(self) -> dict[str, np.ndarray]:
        wanted = {name: leaf for name, leaf in self._on_host.items() if leaf.nbytes <= _SMALL}
        with contextlib.suppress(UserError):
            return self._load(wanted)
        return {}  # each leaf is read alone, so that the error names it

    def read(self, name: str) -> np.ndarray:
        """Reads one leaf onto the host. Raises UserError if it is damaged."""
        wanted = self._on_host[name]
        small = self._small if wanted.nbytes <= _SMALL else {}
        return small[name] if name in small else self._load({name: wanted})[name]

    def place(self, name: str, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        """Reads one leaf with the dtype and sharding of `abstract`. Each process reads only chunks that overlap its
        slices, except of small leaves.

        Raises:
          UserError: the leaf is damaged.
        """
        if self._on_host[name].nbytes <= _SMALL:
            return put_slices(self.read(name).__getitem__, abstract)
        return self._load({name: abstract})[name]

    def _load(self, wanted: dict[str, Any]) -> dict[str, Any]:
        from orbax.checkpoint import v1 as ocp

        context = ocp.Context()
        context.pytree.loading.partial_load = True
        with _undamaged(self.path, next(iter(wanted)) if len(wanted) == 1 else ""), context:
            return names_of(ocp.load(abstract_state=nested(wanted), **_address(self.path)))


@contextlib.contextmanager
def writer(path: Path, custom: Mapping[str, Any] | None = None) -> Iterator[Callable[[Mapping[str, np.ndarray]], None]]:
    """Creates a checkpoint at `path`. The yielded function adds leaves to the checkpoint's tree `state`.

    The function's argument maps slash-separated paths to leaves. Leaves are buffered until they total _TOGETHER bytes,
    because each write takes longer the more leaves the checkpoint already has.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False  # four times as fast as with compression, and 8 % larger
    context.array.saving.storage_options.chunk_byte_size = _CHUNK
    waiting: dict[str, np.ndarray] = {}

    def write() -> None:
        ocp.partial.save(absolute(path), nested(waiting), custom_metadata=dict(custom or {}))
        waiting.clear()

    def add(leaves: Mapping[str, np.ndarray]) -> None:
        waiting.update(leaves)
        if sum(leaf.nbytes for leaf in waiting.values()) >= _TOGETHER:
            write()

    with context:
        yield add
        if waiting:
            write()
        ocp.partial.finalize(absolute(path))


@contextlib.contextmanager
def _undamaged(path: Path, name: str = "") -> Iterator[None]:
    """Turns errors of Orbax and TensorStore for missing, truncated or invalid files into a UserError."""
    # Orbax also logs tracebacks of the errors that it raises.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    _silence_answers()
    # Orbax leaves behind tasks with unretrieved errors, which asyncio logs when the tasks are freed. That may happen
    # at any time until the process ends, so the filter is not removed after an error.
    tasks = logging.getLogger("asyncio")
    had_errors = _is_retrieved in tasks.filters
    tasks.addFilter(_is_retrieved)
    try:
        yield
        if not had_errors:
            tasks.removeFilter(_is_retrieved)
    except UserError:
        raise
    except Exception as error:
        # If reading a shard fails, `error` is a bare Exception, and the actual error is its cause.
        cause = error.__cause__ if type(error) is Exception else error
        if not isinstance(cause, OSError | ValueError | KeyError | RecursionError):
            raise
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
        where = f"{path}: {name}" if name else path
        raise gone(path) or UserError(f"{where}: the checkpoint is damaged or incomplete ({reason})") from error
    finally:
        logger.setLevel(level)


def _is_retrieved(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


@functools.cache
def _silence_answers() -> None:
    """Suppresses Python's traceback if a thread of TensorStore calls an event loop that Orbax closed after an error."""
    others = sys.unraisablehook

    def hook(event: Any) -> None:
        if not (isinstance(event.exc_value, RuntimeError) and str(event.exc_value) == "Event loop is closed"):
            others(event)

    sys.unraisablehook = hook


def gone(folder: Any) -> UserError | None:
    """Returns the error for a checkpoint, or a part of one, that was removed while it was read; None if `folder`
    exists."""
    if folder.exists():
        return None
    return UserError(
        f"{folder} was removed while it was read, probably by a run that deletes its old checkpoints: read a newer "
        "one, or let the run keep more (max_num_checkpoints_to_keep)"
    )
