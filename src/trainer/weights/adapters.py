"""Checkpoints of adapters, alone and merged into their base."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from trainer.checkpoint.base import checked
from trainer.checkpoint.manager import RUN
from trainer.checkpoint.sidecar import CONFIG, TOKENIZER, Base, Sidecar, saved_config
from trainer.config.capabilities.lora_keys import ADAPTER, A, B
from trainer.config.capabilities.quantization_keys import OF_STORED
from trainer.config.dump import as_words
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.resolve import frozen
from trainer.config.tokenizer_files import has_tokenizer
from trainer.layers.adapted import delta
from trainer.leaves.about import About
from trainer.leaves.source import Leaf, Shapes, Source
from trainer.models.adapters import kernel_of
from trainer.products.dequantized import dequantize
from trainer.weights.about_files import about_in
from trainer.weights.model_keys import MODULES
from trainer.weights.params.read import ParamsSource
from trainer.weights.stored import quantized_on_load


class Adapters(Protocol):
    """A checkpoint of adapters, and of other parameters that were trained together with the adapters.

    Attributes:
      path, kind, tokenizer, about, averaged: see `Source`.
      origin: the path and the digests of the base parameters of the adapters; the digests are empty if the checkpoint
        stores none.
      described: the model's configuration keys; {} if the checkpoint stores none.
    """

    path: Path
    kind: str
    tokenizer: Path
    about: About
    averaged: bool
    origin: Base
    described: Mapping[str, Any]

    def lora_keys(self, config: Config) -> Mapping[str, Any]:
        """Returns the LoRA keys to set in the resolved `config`, so that its model has these adapters and trains the
        same parameters as the checkpoint's model."""

    def leaves(self, config: Config, shapes: Shapes) -> dict[str, Leaf]:
        """Returns the trained leaves: adapters and other parameters.

        Args:
          config: the resolved configuration, including `lora_keys`.
          shapes: the shapes of all weights of a model of `config`.

        Raises:
          UserError: the adapters of `config` differ from these adapters, or a shape differs.
        """


class RunAdapters:
    """The `Adapters` of a run's checkpoint."""

    def __init__(self, checkpoint: Any, sidecar: Sidecar, *, average: bool = False):
        assert sidecar.base is not None
        self._source = ParamsSource(checkpoint, "", f"{RUN}/{CONFIG}", f"{RUN}/{TOKENIZER}", average=average)
        self._saved = Config(saved_config(sidecar, checkpoint))
        self.path, self.kind, self.origin = checkpoint, "adapters of a run", sidecar.base
        self.tokenizer, self.averaged = self._source.tokenizer, self._source.averaged
        self.described, self.length = self._source.keys, self._source.length
        self.about = about_in(self.tokenizer)
        self.seed: int = self._saved["init_weights_seed"]

    def lora_keys(self, config: Config) -> Mapping[str, Any]:
        names = (
            "enable_lora",
            "lora_rank",
            "lora_alpha",
            "lora_module_path",
            "lora_weight_qtype",
            "lora_tile_size",
            "trainable_parameters_mask",
        )
        return {name: frozen(self._saved[name]) for name in names if name in self._saved}

    def leaves(self, config: Config, shapes: Shapes) -> dict[str, Leaf]:
        keys = self.lora_keys(config)
        if self.described["rope_interleave"] != config.rope_interleave:
            words = " ".join(as_words(self.described, ["rope_interleave"]))
            raise UserError(f"{self.path}: its adapters were trained with another rope_interleave; give {words}")
        if wrong := [name for name in ("lora_rank", "lora_alpha", "lora_module_path") if keys[name] != config[name]]:
            raise UserError(
                f"{self.path}: its adapters differ from those of the configuration "
                f"({' '.join(as_words(config, wrong))}); give {' '.join(as_words(keys, wrong))}"
            )
        names = {name for name in shapes if ADAPTER.search(name)} | {*self._source.held(config, shapes)}
        return self._source.leaves(config, {name: shape for name, shape in shapes.items() if name in names})


class WithAdapters:
    """A `Source`: the parameters of `base` with the adapters added to them."""

    def __init__(self, base: Source, adapters: Adapters, shapes_of: Callable[[Config], Shapes]):
        """`shapes_of`: returns the shapes of a model's weights (`open.weight_shapes`)."""
        self._base, self._adapters, self._shapes_of = base, adapters, shapes_of
        self.path, self.averaged = adapters.path, adapters.averaged
        own = has_tokenizer(adapters.tokenizer, "auto")
        self.tokenizer = adapters.tokenizer if own else base.tokenizer
        self.about = base.about.under(adapters.about)
        self.kind, self.length = f"{base.kind} with {adapters.kind}", base.length
        self.keys = _keys_of_merged(base, adapters.described)

    def notes(self, config: Config) -> Sequence[str]:
        place = self._base.path
        return [f"{self.path}: its adapters are added to the parameters of {place}", *self._base.notes(config)]

    def held(self, config: Config, shapes: Shapes) -> Collection[str]:
        return self._base.held(config, shapes)

    def leaves(self, config: Config, shapes: Shapes) -> dict[str, Leaf]:
        if config.checkpoint_is_quantized:
            raise UserError(
                f"{self.path}: adapters cannot be added to quantized weights; give checkpoint_is_quantized=false"
            )
        keys = self._adapters.lora_keys(config)
        rounded = quantized_on_load(Config({**config, **keys}))
        own = Config({**config, **keys, "lora_weight_qtype": ""})
        found = {
            name: checked(name, leaf, self._adapters.origin, self.path)
            for name, leaf in self._base.leaves(config, shapes).items()
        }
        trained = self._adapters.leaves(own, self._shapes_of(own))
        pairs: dict[str, dict[str, Leaf]] = {}
        for name, leaf in trained.items():
            if ADAPTER.search(name):
                pairs.setdefault(kernel_of(name), {})[name.rpartition("/")[2]] = leaf
            elif name in shapes:
                found[name] = leaf
        for kernel, pair in pairs.items():
            if kernel in found:
                store = rounded[kernel].store if kernel in rounded else None
                found[kernel] = _merged(found[kernel], pair[A], pair[B], keys["lora_alpha"] / keys["lora_rank"], store)
        return found


def _keys_of_merged(base: Source, run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of the merged model. They are `run`, the keys in the adapters' checkpoint; if `run` is empty,
    they are the base's keys. The keys of quantized storage are omitted, because merged weights are floats. The number
    of modules for multi-token prediction is always the base's."""
    own = {name: value for name, value in (run or base.keys).items() if name not in OF_STORED}
    return own | ({MODULES: base.keys[MODULES]} if MODULES in own.keys() & base.keys.keys() else {})


def _merged(kernel: Leaf, a: Leaf, b: Leaf, scale: float, store: Callable[[jax.Array], Any] | None) -> Leaf:
    """Returns a leaf with the values `kernel` + `scale` * (a @ b), added in float32.

    `store`: with QLoRA, the function that quantizes the kernel; otherwise None. With QLoRA, the adapter was trained on
    the dequantized values of the quantized kernel, so it is added to these values, not to the original ones.
    """
    held: list[Any] = []  # the factors a and b, which are small enough to keep in memory

    @jax.jit
    def rounded(value: jax.Array) -> jax.Array:
        assert store is not None
        return dequantize(store(value), jnp.dtype(jnp.float32))

    def added(i: int) -> np.ndarray:
        if not held:
            held.extend(leaf.read(np.dtype(np.float32), lambda size: None) for leaf in (a, b))
        alone = len(kernel.parts) == 1
        one, other = (factor if alone else factor[i] for factor in held)
        return delta(one, other, scale, len(kernel.shape) - (not alone))

    def read(i: int) -> np.ndarray:
        value = kernel.parts[i]()
        exact = value.astype(np.float32)
        if store is not None:
            exact = np.asarray(rounded(exact.reshape(-1, *kernel.shape[1:]))).reshape(value.shape)
        return (exact + added(i).reshape(value.shape)).astype(value.dtype)

    def put(i: int, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        exact = jax.ShapeDtypeStruct(abstract.shape, jnp.float32, sharding=abstract.sharding)
        more = jax.device_put(added(i).reshape(abstract.shape), abstract.sharding)
        value = kernel.puts[i](exact)
        return ((value if store is None else rounded(value)) + more).astype(abstract.dtype)

    numbers = range(len(kernel.parts))
    return Leaf(
        kernel.shape,
        kernel.dtype,
        [functools.partial(read, i) for i in numbers],
        [functools.partial(put, i) for i in numbers],
        kernel.mixed,
    )


class Initial:
    """A `Source`: the initial parameters of a run that loaded no parameters."""

    def __init__(self, run: RunAdapters, draw: Callable[[Config], Mapping[str, jax.Array]]):
        """`draw`: returns the initial weights, by name, of a model of a resolved configuration."""
        self.path, self.tokenizer, self.keys, self.length = run.path, run.tokenizer, run.described, run.length
        self.kind, self.averaged = "initial parameters", False
        self.about = run.about
        self._draw, self._seed = draw, run.seed

    def notes(self, config: Config) -> Sequence[str]:
        return ()

    def held(self, config: Config, shapes: Shapes) -> Collection[str]:
        return [*shapes]

    def leaves(self, config: Config, shapes: Shapes) -> dict[str, Leaf]:
        drawn = self._draw(Config({**config, "init_weights_seed": self._seed}))
        return {name: _in_memory(drawn[name]) for name in shapes}


def _in_memory(value: jax.Array) -> Leaf:
    def put(abstract: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(value.astype(abstract.dtype), abstract.sharding)

    return Leaf(value.shape, np.dtype(value.dtype), [lambda: np.asarray(value)], [put])
