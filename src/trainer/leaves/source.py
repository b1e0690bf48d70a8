"""The interface of all kinds of checkpoints: named leaves that are read one part at a time."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from flax import traverse_util
from tqdm import tqdm

from trainer.config.errors import UserError, shortened
from trainer.config.keys import Config
from trainer.leaves.about import About
from trainer.ops.paths import by_name, name_of

T = TypeVar("T")

Box = tuple[slice, ...]  # a part of an array: a start and a stop for each axis

# Maps canonical names such as "decoder/layers/mlp/wi_0/kernel" to shapes, with the layers axis first.
Shapes = Mapping[str, tuple[int, ...]]
Tick = Callable[[int], Any]  # called with the size in bytes of each part that was read

_EVERY = 10.0  # minimum seconds between two progress lines
_MOST_LINES = 20  # maximum number of tensors that a message lists
# The dtypes in which tensors may be stored, by their NumPy names.
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Leaf:
    """One canonical array of a model's weights in a checkpoint. Its values have not been read yet.

    Attributes:
      shape: the canonical shape.
      dtype: the stored dtype; float32 if layers are stored in several dtypes.
      parts: functions that read the values as stored: one function per layer, or one for the complete leaf.
      puts: functions that put the same parts onto devices, given a part's shape (layers first), dtype and sharding.
        Each host reads only its devices' slices of a part. `puts` is () for a leaf that is only written.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Sequence[Callable[[], np.ndarray]]
    puts: Sequence[Callable[[jax.ShapeDtypeStruct], jax.Array]] = ()
    mixed: tuple[str, ...] = ()  # the names of the dtypes, if layers are stored in several
    buffer: bool = False  # whether the leaf is state without gradient, which no export casts

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the values in `dtype`; never less than the number of stored bytes."""
        return self.size * self.dtype.itemsize

    def read(self, dtype: np.dtype, tick: Tick) -> np.ndarray:
        """Returns the complete leaf in `dtype`. Parts are read and cast one after the other."""
        if len(self.parts) == 1:
            value = self.parts[0]().astype(dtype, copy=False)
            tick(self.nbytes)
            return value.reshape(self.shape)  # with one layer, the part has no layers axis
        whole = np.empty(self.shape, dtype)
        for i, part in enumerate(self.parts):
            whole[i] = part()
            tick(self.nbytes // len(self.parts))
        return whole

    def layers(self, tick: Tick) -> Iterator[np.ndarray]:
        """Yields the leaf's layers as stored, in their order."""
        for part in self.parts:
            value = part()
            tick(self.nbytes // len(self.parts))
            yield from ([value] if value.ndim < len(self.shape) else value)


def whole(shape: tuple[int, ...]) -> Box:
    """Returns the box of the complete array."""
    return tuple(slice(0, size) for size in shape)


def within(box: Box, outer: Box) -> Box:
    """Returns `box` with positions relative to `outer`, which contains it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def put_slices(read: Callable[[Box], np.ndarray], abstract: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the array that `abstract` describes, on devices. `read` is called once for each distinct slice that this
    host's devices need."""
    shape, sharding = abstract.shape, abstract.sharding
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        ends = tuple(cut.indices(size)[:2] for cut, size in zip(index or (), shape, strict=True))
        devices.setdefault(ends, []).append(device)
    arrays = []
    for ends, replicas in devices.items():
        value = read(tuple(slice(*pair) for pair in ends)).astype(abstract.dtype, copy=False)
        for device in replicas:
            target = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            arrays.append(jax.device_put(value, target).block_until_ready())  # waits, so that `value` can be freed
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def resharded(sharding: Any, ndim: int, change: Callable[[list[Any]], list[Any]]) -> Any:
    """Returns the sharding, in device memory, of an array derived from an array with `ndim` axes and `sharding`.

    `change` maps the PartitionSpec entries of the original array, one per axis, to those of the derived array.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding  # the array is on one device
    axes = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*change(axes)))


class Source(Protocol):
    """A checkpoint of a recognized kind. Its headers have been read, but no values."""

    path: Path
    tokenizer: Path  # the folder with the tokenizer's files, if there are any
    kind: str  # the kind of checkpoint, in words
    about: About  # data about the model other than weights and tokenizer
    length: int | None  # the maximum text length for which the model was trained, if the checkpoint states it
    averaged: bool  # whether averages of its parameters are available (`ema_decay`)

    @property
    def keys(self) -> Mapping[str, Any]:
        """The model's configuration keys, resolved, if the checkpoint itself stores them; otherwise {}."""

    def notes(self, config: Config) -> Sequence[str]:
        """Returns one line for each assumption made when the checkpoint is read as a model of `config`."""

    def held(self, config: Config, shapes: Shapes) -> Collection[str]:
        """Returns the names of the weights that the checkpoint contains, at least in part.

        `shapes`: the shapes of all weights of a model of `config`.
        """

    def leaves(self, config: Config, shapes: Shapes) -> dict[str, Leaf]:
        """Returns a leaf for each weight in `shapes`, in the same order.

        `shapes`: the shapes of all weights of a model of the resolved `config`.

        Raises:
          UserError: tensors are missing, unexpected or have a wrong shape; the error lists them all. It is not
            an error if the checkpoint has more multi-token prediction modules than `config`.
        """


def check_tensors(
    found: Mapping[str, tuple[tuple[int, ...], str]],
    wanted: Mapping[str, tuple[int, ...]],
    where: str,
    dtypes: Collection[str] = DTYPES,
) -> None:
    """Checks the tensors of a checkpoint against the `wanted` shapes and the allowed `dtypes`.

    `found`: a dict from each tensor's name to the tensor's shape and dtype.

    Raises:
      UserError: lists all differences, one per line.
    """
    lines = []
    for name, (shape, dtype) in found.items():
        if name in wanted and shape != wanted[name]:
            lines.append(f"{name}: found {_shape(shape)}, wanted {_shape(wanted[name])}")
        elif name in wanted and dtype not in dtypes:
            lines.append(f"{name}: stored as {dtype}, known: {', '.join(dtypes)}")
    lines += [f"{name}: missing, wanted {_shape(shape)}" for name, shape in wanted.items() if name not in found]
    lines += [
        f"{shortened(name)}: the model has no such parameter, found {_shape(shape)}"
        for name, (shape, _) in found.items()
        if name not in wanted
    ]
    if lines:
        count = "1 tensor does" if len(lines) == 1 else f"{len(lines)} tensors do"
        more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        raise UserError("\n  ".join([f"{where}: {count} not fit the configuration:", *lines[:_MOST_LINES], *more]))


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def common_dtype(dtypes: Collection[np.dtype]) -> tuple[np.dtype, tuple[str, ...]]:
    """Returns `Leaf.dtype` and `Leaf.mixed` of a leaf whose layers are stored in `dtypes`."""
    kinds = dict.fromkeys(dtypes)
    return (next(iter(kinds)), ()) if len(kinds) == 1 else (np.dtype(np.float32), tuple(kind.name for kind in kinds))


@contextlib.contextmanager
def progress(leaves: Iterable[Leaf], label: str, say: Callable[[str], Any] = print) -> Iterator[Tick]:
    """Yields a function that counts bytes and, if the work takes long, shows the progress through `leaves`.

    On a terminal, it shows a bar on stderr. Elsewhere, it passes lines to `say`, at most one per 10 s.
    """
    total = sum(leaf.nbytes for leaf in leaves)
    if sys.stderr.isatty():
        with tqdm(desc=label, total=total, unit="B", unit_scale=True, leave=False, mininterval=0.2, delay=1.0) as bar:
            yield bar.update
        return
    done, started = 0, time.monotonic()
    last = started

    def tick(size: int) -> None:
        nonlocal done, last
        done, now = done + size, time.monotonic()
        if now - last >= _EVERY:
            last = now
            say(f"{label}: {done / 1e9:.2f} of {total / 1e9:.2f} GB, {done / (now - started) / 1e6:.0f} MB/s")

    yield tick


def names_of(tree: Any) -> dict[str, Any]:
    """Returns a flat dict from canonical names to the leaves of the nested dict `tree`, in the order of `tree`.

    If a value is itself a pytree, each of its leaves has an entry.
    """
    parts = {name: by_name(value) for name, value in _flat(tree).items()}
    return {f"{name}/{part}".rstrip("/"): leaf for name, found in parts.items() for part, leaf in found.items()}


def filled(tree: T, flat: Mapping[str, Any]) -> T:
    """Returns `tree` with each leaf replaced by the entry of `flat` for the leaf's canonical name (see `names_of`)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: flat[name_of(path)], tree)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a nested dict of the leaves in `flat`: each part of a canonical name becomes a key."""
    return traverse_util.unflatten_dict(flat, sep="/")


def _flat(tree: Any) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, sep="/")


def joined(params: Any, rest: Any) -> dict[str, Any]:
    """Returns a model's weights, that is, its parameters and its state without gradient, in one nested dict."""
    return nested(_flat(params) | _flat(rest))


def parted(weights: Any, rest: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inverts `joined`: returns (parameters, state without gradient). `rest` has the structure of the state."""
    flat, others = _flat(weights), _flat(rest).keys()
    params = {name: leaf for name, leaf in flat.items() if name not in others}
    return nested(params), nested({name: leaf for name, leaf in flat.items() if name in others})
