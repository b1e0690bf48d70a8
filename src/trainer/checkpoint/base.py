"""Omits the base model from checkpoints of adapters, restores it, and verifies it by hashes."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from trainer.checkpoint.manager import newest
from trainer.checkpoint.sidecar import Base
from trainer.config.errors import UserError
from trainer.config.paths import local_path
from trainer.leaves.source import Leaf, resharded
from trainer.ops.paths import Path, by_path, path_of
from trainer.runtime import storage

T = TypeVar("T")

_TRAINED, _SAME = "its adapters were trained on a base", "the unchanged base"
_FLOATS = ("float32", "bfloat16")  # dtypes of parameters, the more precise one first


def without_base(tree: T, names: Collection[Path]) -> T:
    """Returns the canonical train state `tree` with None in place of the parameters `names` and of their
    optimizer state."""
    if not names:
        return tree
    return jax.tree_util.tree_map_with_path(lambda path, leaf: None if _owner(path_of(path), names) else leaf, tree)


def with_base(saved: Any, abstract: T, base: Mapping[Path, jax.Array]) -> T:
    """Returns the complete train state: `saved` with the omitted leaves inserted.

    Args:
      saved: the result of `without_base`.
      abstract: the complete state: a ShapeDtypeStruct with a sharding at each leaf.
      base: the omitted parameters by path. Each of DiLoCo's islands gets a copy of them. DiLoCo's outer optimizer state
        for these parameters is set to zero, because they never change.
    """

    found = by_path(saved)

    def one(keypath: Any, like: Any) -> Any:
        if (path := path_of(keypath)) in found:
            return found[path]
        if path[0] == "outer_opt_state":
            return jnp.zeros(like.shape, like.dtype, device=like.sharding)
        owner = _owner(path, base)
        assert owner is not None, path
        value = base[owner]
        if (value.shape, value.dtype, value.sharding) == (like.shape, like.dtype, like.sharding):
            return value
        copy = jax.jit(lambda x: jnp.broadcast_to(x, like.shape).astype(like.dtype), out_shardings=like.sharding)
        return copy(value)

    return jax.tree_util.tree_map_with_path(one, abstract)


def _owner(path: Path, names: Collection[Path]) -> Path | None:
    return next((path[start:] for start in range(len(path)) if path[start:] in names), None)


def base_of(path: str, base: Mapping[Path, jax.Array]) -> Base:
    """Returns a description of a base model, to be stored in the checkpoints of adapters for this model. `path`: the
    folder with the base's parameters; "" if they are initial values."""
    return Base(place_of(path) if path else "", digests(base))


def place_of(path: str) -> str:
    """Returns the absolute path of the checkpoint at `path`. If `path` is a run's folder, returns the path of the run's
    newest checkpoint."""
    folder = storage.folder(path)
    place = str(newest(folder) or folder)
    return place if "://" in place else str(local_path(place).absolute())


def digests(base: Mapping[Path, jax.Array]) -> dict[str, dict[str, str]]:
    """Returns hashes of parameters as {dtype: {name: hash}}. The dtype "float32" contains the hashes of the exact
    values, and "bfloat16" the hashes of the values rounded to bfloat16. If any parameter is bfloat16, "float32" is
    omitted. Equal values have equal hashes on every mesh.
    """
    kinds = _FLOATS[any(leaf.dtype == _FLOATS[1] for leaf in base.values()) :]
    names, leaves = ["/".join(path) for path in base], [*base.values()]
    # Arrays in host memory are moved to the devices one by one.
    together = all(_on_device(leaf).memory_kind == leaf.sharding.memory_kind for leaf in leaves)
    found = [_sums(group, kinds) for group in ([leaves] if together else [[leaf] for leaf in leaves])]
    sums = [[words for group in found for words in group[i]] for i in range(len(kinds))]
    return {kind: dict(zip(names, map(_text, of_kind), strict=True)) for kind, of_kind in zip(kinds, sums, strict=True)}


def _on_device(leaf: jax.Array) -> Any:
    """Returns the sharding of `leaf`, with device memory instead of host memory."""
    return resharded(leaf.sharding, leaf.ndim, lambda axes: axes)


def _sums(leaves: Sequence[Any], kinds: tuple[str, ...], start: int = 0) -> list[list[np.ndarray]]:
    """Returns one list for each dtype in `kinds`, with the hash (see `_words`) of each array in this dtype. The arrays
    may be in host memory."""
    placed = [jax.device_put(leaf, _on_device(leaf)) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    return jax.device_get(_all_words(placed, kinds, np.uint32(start % (1 << 32))))


# One program for all leaves, which compiles much faster than one program per shape.
@functools.partial(jax.jit, static_argnums=1)
def _all_words(leaves: Sequence[jax.Array], kinds: tuple[str, ...], start: np.uint32) -> list[list[jax.Array]]:
    return [[_words(leaf, jnp.dtype(kind), start) for leaf in leaves] for kind in kinds]


def _words(leaf: jax.Array, floats: jnp.dtype, start: np.uint32) -> jax.Array:
    """Returns two sums of the bits of all entries of `leaf`, weighted by position, uint32 [2]. Integer sums do not
    depend on the summation order. `start`: the position of the first entry of `leaf` in the array of which it is a
    part."""
    if leaf.dtype in map(jnp.dtype, _FLOATS):
        leaf = leaf.astype(floats)
    elif jnp.issubdtype(leaf.dtype, jnp.integer):
        leaf = leaf.astype(jnp.int8)  # so int4 and int8 arrays with equal values have equal hashes
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.zeros(leaf.shape, jnp.uint32)
    for axis, size in enumerate(leaf.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    place += start
    # Multiplication by an odd weight is one-to-one modulo 2^32, so a change of a single entry always changes the sum.
    weights = [(place * jnp.uint32(factor)) ^ (place >> 15) | 1 for factor in (2654435761, 2246822519)]
    return jnp.stack([jnp.sum(bits * weight, dtype=jnp.uint32) for weight in weights])


def check_base(
    found: Mapping[Path, jax.Array], base: Base, where: Any, what: str = _TRAINED, instead: str = _SAME
) -> None:
    """Compares the loaded parameters `found` with the description `base` of the base model in the checkpoint `where`.
    Does nothing if `base` has no digests. Ignores parameters that are only in `found` or only in `base`. `what`,
    `instead`: phrases for the error message.

    Raises:
      UserError: parameters differ; the message names the first such parameter.
    """
    if not base.digests:
        return
    here, there = digests(found), base.digests
    kind = next(kind for kind in _FLOATS if kind in here and kind in there)
    changed = [name for name, digest in here[kind].items() if there[kind].get(name, digest) != digest]
    if changed:
        more = f" and {len(changed) - 1} more have" if len(changed) > 1 else " has"
        raise _other_values(where, base, f"{changed[0]}{more}", what, instead)


def _other_values(where: Any, base: Base, changed: str, what: str = _TRAINED, instead: str = _SAME) -> UserError:
    return UserError(
        f"{where}: {what} with other values: {changed} changed in {base.path or 'the initial parameters'}; give "
        f"{instead} with load_parameters_path"
    )


def checked(name: str, leaf: Leaf, base: Base, where: Any) -> Leaf:
    """Returns `leaf`, the parameter `name` of a base model, with a check of its values: reading the last part of the
    leaf raises UserError if the values differ from the original values of the base model, which `base` describes (see
    `check_base`). `where`: the checkpoint that omits the base model."""
    kinds = {kind: base.digests[kind][name] for kind in _FLOATS if name in base.digests.get(kind, ())}
    if not kinds:
        return leaf
    count, sums = len(leaf.parts), dict[int, np.ndarray]()

    def same(i: int, value: Any) -> Any:
        exact = value.astype(np.float32) if value.dtype == np.float16 else value
        kind = _FLOATS[0] if _FLOATS[0] in kinds and exact.dtype != jnp.bfloat16 else _FLOATS[1]
        ((sums[i],),) = _sums([exact], (kind,), i * (leaf.size // count))
        if len(sums) == count:
            if _text(np.stack([*sums.values()]).sum(axis=0, dtype=np.uint32)) != kinds[kind]:
                raise _other_values(where, base, f"{name} has")
            sums.clear()
        return value

    def wrapped(reads: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
        return [lambda *args, i=i, read=read: same(i, read(*args)) for i, read in enumerate(reads)]

    return dataclasses.replace(leaf, parts=wrapped(leaf.parts), puts=wrapped(leaf.puts))


def _text(words: np.ndarray) -> str:
    return "".join(f"{word:08x}" for word in words.tolist())
