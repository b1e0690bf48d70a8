"""Weights that a checkpoint stores quantized, and their conversion from and to floats."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.backends.registry import make_model
from trainer.config.capabilities.quantization_keys import OF_STORED
from trainer.config.keys import Config
from trainer.leaves.source import Leaf, filled, joined, names_of, nested
from trainer.models.adapters import storage_of_base
from trainer.models.families import place, stacks
from trainer.models.huggingface import reordered
from trainer.models.matrices import lora_kernels
from trainer.products.dequantized import dequantize, float_shape, is_stored


def stored_kernels(config: Config) -> dict[str, Any]:
    """Returns the kernels that a model of the resolved `config` stores quantized, by canonical name: each is a pytree
    of ShapeDtypeStructs."""
    return {**_stored_kernels(config)} if config.checkpoint_is_quantized or config.lora_weight_qtype else {}


@functools.lru_cache(maxsize=4)  # reading a checkpoint calls this function several times
def _stored_kernels(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def visit(above: str, node: Any) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                visit(f"{above}{key}/", value)
            elif is_stored(value):
                found[f"{above}{key}"] = value

    visit("", joined(*make_model(config).abstract))
    return found


class OnLoad(NamedTuple):
    """A kernel that is quantized when a float checkpoint is loaded."""

    shape: tuple[int, ...]  # the shape of the float kernel
    parts: tuple[str, ...]  # the names of its stored parts
    store: Callable[[jax.Array], Any]  # converts the kernel, or some of its layers, to stored form


def quantized_on_load(config: Config) -> dict[str, OnLoad]:
    """Returns the kernels that QLoRA quantizes (lora_weight_qtype), by canonical name."""
    if not (config.enable_lora and config.lora_weight_qtype) or config.checkpoint_is_quantized:
        return {}
    stored, storage = stored_kernels(config), storage_of_base(config)
    shapes = {name: float_shape(kernel) for name, kernel in stored.items()}
    return {
        name: OnLoad(
            shapes[name],
            tuple(names_of(nested({name: stored[name]}))),
            functools.partial(storage.store, kernel, stacked=int(place(stacks(config), name) is not None)),
        )
        for name, kernel in lora_kernels(config, shapes).items()
    }


def with_storage(config: Config, keys: Mapping[str, Any]) -> Any:
    """Returns the resolved `config` with the weights' storage format (`OF_STORED`) that `keys` define."""
    said = {name: keys[name] for name in OF_STORED if name in keys}
    return Config(dict(config.items()) | said)


def as_floats(config: Config, kernels: Mapping[str, Any], leaves: Mapping[str, Leaf], heads: Mapping[str, int]) -> Any:
    """Returns the leaves of a float model, given the leaves of a model that stores `kernels` quantized.

    Args:
      config: resolved.
      leaves: all leaves of the quantized model. All layers of a kernel's parts are read at once.
      heads: the number of entries of a head, by the name of each kernel whose heads must be reordered.
    """
    found = dict(leaves)
    for name, kernel in kernels.items():
        parts = {part: found.pop(part) for part in names_of(nested({name: kernel}))}
        stacked = place(stacks(config), name) is not None
        found[name] = _float_leaf(name, kernel, parts, stacked, heads.get(name, 0), config.rope_interleave)
    return found


def _float_leaf(name: str, kernel: Any, parts: Mapping[str, Leaf], stacked: bool, head: int, pairs: bool) -> Leaf:
    shape = float_shape(kernel)
    held: list[Any] = []  # the parts of all layers, kept while layers are read

    def stored() -> Any:
        if not held:
            arrays = {part: leaf.read(leaf.dtype, lambda size: None) for part, leaf in parts.items()}
            held.append(with_arrays(name, kernel, arrays))
        return held[0]

    def layer(i: int) -> Any:
        one = jax.tree.map(lambda part: part[i : i + 1] if stacked else part, stored())
        if not stacked or i == shape[0] - 1:
            held.clear()
        return one

    def read(i: int) -> np.ndarray:
        found = np.asarray(_floats(layer(i), head, pairs))
        return found[0] if stacked else found

    def put(i: int, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(_floats(layer(i), head, pairs).astype(abstract.dtype), abstract.sharding)

    layers = range(shape[0] if stacked else 1)
    return Leaf(
        shape,
        np.dtype(np.float32),
        [functools.partial(read, i) for i in layers],
        [functools.partial(put, i) for i in layers],
    )


# Kernels with equal shapes share a compiled program.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _floats(one: Any, head: int, pairs: bool) -> jax.Array:
    return reordered(dequantize(one, jnp.dtype(jnp.float32)), head, pairs=pairs)


def as_stored(
    config: Config,
    kernels: Mapping[str, Any],
    leaves: Mapping[str, Leaf],
    quantize: Callable[[str, np.ndarray], Any],
    made: Callable[[str], Mapping[str, np.ndarray]] = lambda name: {},
) -> dict[str, Leaf]:
    """Returns the leaves of a model that stores `kernels` quantized, given the leaves of a float model. The result is
    only for writing: read each leaf once, in order. The parts of a kernel are consecutive.

    Args:
      config: resolved.
      quantize: converts one layer of a kernel to stored form, given the kernel's canonical name and float values.
      made: returns the parts of a kernel that is already quantized, given its canonical name; {} for other kernels.
    """
    found: dict[str, Leaf] = {}
    for name, leaf in leaves.items():
        if name not in kernels:
            found[name] = leaf
            continue
        if parts := made(name):
            found |= {
                part: Leaf(array.shape, array.dtype, [functools.partial(np.array, array)])
                for part, array in parts.items()
            }
            continue
        abstract = names_of(nested({name: kernels[name]}))
        stacked = place(stacks(config), name) is not None
        new = _Made(name, leaf, stacked, functools.partial(quantize, name), abstract)
        for part, like in abstract.items():
            found[part] = Leaf(like.shape, np.dtype(like.dtype), [functools.partial(new.take, part)])
    return found


class _Made:
    """The parts of one kernel, which stay in memory only while they are written."""

    def __init__(
        self, name: str, leaf: Leaf, stacked: bool, quantize: Callable[[np.ndarray], Any], abstract: Mapping[str, Any]
    ):
        self._name, self._leaf, self._stacked, self._quantize = name, leaf, stacked, quantize
        self._abstract, self._arrays = abstract, dict[str, np.ndarray]()

    def take(self, part: str) -> np.ndarray:
        """Returns a part's array and frees it. The first call quantizes the kernel layer by layer."""
        if not self._arrays:
            self._arrays = {name: np.empty(like.shape, like.dtype) for name, like in self._abstract.items()}
            read = self._leaf.layers if self._stacked else lambda tick: [self._leaf.read(self._leaf.dtype, tick)]
            for i, value in enumerate(read(lambda size: None)):
                for name, array in names_of(nested({self._name: self._quantize(value)})).items():
                    self._arrays[name][i if self._stacked else ...] = array
        return self._arrays.pop(part)


def with_arrays(name: str, kernel: Any, arrays: Mapping[str, Any]) -> Any:
    """Returns the pytree `kernel` with its leaves replaced by `arrays`, whose keys (`names_of`) begin with `name`."""
    tree = filled(nested({name: kernel}), arrays)
    return functools.reduce(lambda node, key: node[key], name.split("/"), tree)
