"""Loads the parameters of a checkpoint, and adapters from lora_restore_path, onto the devices."""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from trainer.backends.registry import make_model
from trainer.checkpoint.base import check_base
from trainer.config.capabilities.lora_keys import ADAPTER, trained_patterns
from trainer.config.dump import as_words
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.load import Loaded
from trainer.leaves.source import DTYPES, Leaf, Shapes, Source, filled, joined, names_of, progress
from trainer.models.optional import lacking
from trainer.ops.random import seed_key
from trainer.weights.model_keys import check_same_model, load_model_keys
from trainer.weights.open import open_adapters, open_source
from trainer.weights.placing import place, place_quantized
from trainer.weights.stored import OnLoad, quantized_on_load

_SHORT = 2.0  # seconds; loading that takes longer is reported
_MOST_PATHS = 12  # the maximum number of paths in a message
_LONGEST = 2048  # the largest default of max_target_length for generation


def of_checkpoint(model_path: str, words: Sequence[str], weights: str | None = None) -> tuple[Loaded, bool]:
    """Returns the configuration for generation with the model at `model_path`, and whether to load averaged
    parameters.

    Args:
      words: further arguments, KEY=VALUE.
      weights: "raw", or "ema" for averaged parameters; None: "ema" if the checkpoint contains averages (`ema_decay`).

    Raises:
      UserError: the checkpoint does not contain the model's keys, or `words` contradict them.
    """
    given = [word.partition("=")[0] for word in words]
    source = open_source(
        model_path, dict(word.partition("=")[::2] for word in words).get("decoder_block", ""), average=weights == "ema"
    )
    if not source.keys and "model_name" not in given:
        raise UserError(
            f"{model_path}: this checkpoint does not contain its model's keys; use base.yml "
            f"load_parameters_path={model_path} with model_name=... or its keys"
        )
    own = [f"load_parameters_path={model_path}"]
    if "max_target_length" not in given and source.length is not None:
        own.append(f"max_target_length={min(source.length, _LONGEST)}")
    # Prints nothing, because loading the parameters prints the same lines.
    loaded = load_model_keys(source.keys, [*own, *words], str(source.path), say=lambda line: None)
    return loaded, source.averaged if weights is None else weights == "ema"


def load_parameters(
    path: str,
    config: Config,
    abstract: Any,
    say: Callable[[str], Any],
    given: Collection[str] = (),
    *,
    average: bool = False,
) -> Any:
    """Loads the weights at `path` onto the devices, and adapters from lora_restore_path. Missing optional weights
    (`models.optional`) get their initial values, drawn from `init_weights_seed`.

    At any time, a host's memory contains only one device's slice of one layer of one parameter. For an Orbax tree, it
    contains all chunks of one parameter that overlap the slices of the host's devices.

    Args:
      path: see `open_source`.
      config: resolved; the checkpoint must have the same model.
      abstract: the weights that the model needs (`leaves.source.joined`), as ShapeDtypeStructs with shardings.
      say: prints a line: notes of the source, allowed differences, missing weights, and the time if loading takes long.
      given: keys of the command line, which may change how the checkpoint's parameters are used; see `model_keys.FREE`.
      average: see `open_source`.

    Raises:
      UserError: there is no checkpoint, it has another model, or tensors are missing, unexpected or have a wrong shape.
        The error is raised before any values are read.
    """
    started = time.perf_counter()
    source = open_source(path, config.decoder_block, average=average)
    wanted = names_of(abstract)
    check_same_model(source.keys, config, str(source.path), given, say)
    own = [name for name in wanted if config.enable_lora and ADAPTER.search(name)]
    kernels = quantized_on_load(config)
    whole = _whole_shapes(kernels, wanted)
    shapes = {name: shape for name, shape in whole.items() if name not in own}
    groups = lacking(config, shapes, lambda names: source.held(config, {name: shapes[name] for name in names}))
    new = [name for names in groups.values() for name in names]
    leaves = source.leaves(config, {name: shape for name, shape in shapes.items() if name not in new})
    for name, leaf in leaves.items():
        stored, needed = leaf.dtype.name, DTYPES[0] if name in kernels else wanted[name].dtype.name
        if stored != needed and not {stored, needed} <= {*DTYPES}:
            raise UserError(f"{source.path}: {name}: stored as {stored}, wanted {needed}: only floats can be cast")
    _say_what_is_read(source, path, config, leaves, groups, say)
    loaded = _initial(config, {name: wanted[name] for name in (*new, *own)})
    with progress(leaves.values(), "loading", say) as tick:
        for name, leaf in leaves.items():
            if name in kernels:
                like = {part: wanted[part] for part in kernels[name].parts}
                loaded |= place_quantized(name, leaf, like, kernels[name].store, tick)
            else:
                loaded[name] = place(leaf, wanted[name], tick)
    seconds, size = time.perf_counter() - started, sum(leaf.nbytes for leaf in leaves.values())
    if seconds > _SHORT:
        say(f"loaded {size / 1e9:.2f} GB of parameters from {path} ({source.kind}) in {seconds:.0f} s")
    if config.enable_lora and config.lora_restore_path:
        loaded |= _restored_adapters(config, whole, wanted, loaded)
    return filled(abstract, loaded)


def _say_what_is_read(
    source: Source,
    path: str,
    config: Config,
    leaves: Mapping[str, Leaf],
    groups: Mapping[str, Any],
    say: Callable[[str], Any],
) -> None:
    """Prints notes about the source. `groups`: the weights that `source` lacks (`models.optional`)."""
    stretched = 0 if config.rope_type == "default" else config.rope_factor * config.original_max_position_embeddings
    if source.length and config.max_target_length > max(source.length, stretched):
        say(
            f"warning: max_target_length={config.max_target_length} exceeds the {source.length} positions that the "
            f"model at {path} was trained for: caches and activations grow with it, and text at later positions may "
            "be poor"
        )
    for note in source.notes(config):
        say(note)
    if groups:
        say(f"{source.path}: loaded: {_listed(dict.fromkeys('/'.join(name.split('/')[:2]) for name in leaves))}")
        say(f"{source.path}: absent, with initial values: {_listed(groups)}")


def initial_parameters(config: Config, abstract: Any) -> Any:
    """Returns the initial weights on the devices, with adapters from lora_restore_path. `config` and `abstract`: see
    `load_parameters`.

    Raises:
      UserError: the adapters do not belong to these initial weights.
    """
    adapters = open_adapters(config.lora_restore_path, verify=False)
    if adapters.origin.path or not adapters.origin.digests:
        named = adapters.origin.path or "parameters at an unknown path"
        raise UserError(f"{adapters.path}: its adapters belong to {named}; give their path with load_parameters_path")
    wanted = names_of(abstract)
    loaded = _initial(config, wanted)
    whole = _whole_shapes(quantized_on_load(config), wanted)
    return filled(abstract, loaded | _restored_adapters(config, whole, wanted, loaded))


def _restored_adapters(
    config: Config, whole: Shapes, wanted: Mapping[str, Any], loaded: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Returns the weights at lora_restore_path, for a model with the weights `loaded`. `whole`: see `_whole_shapes`."""
    adapters = open_adapters(config.lora_restore_path)
    leaves = adapters.leaves(config, whole)
    others = [name for name in leaves if not any(re.search(it, name) for it in trained_patterns(config))]
    if others:
        raise UserError(
            f"{adapters.path}: {others[0]} was trained together with its adapters; to train it here, too, give "
            f"{' '.join(as_words(adapters.lora_keys(config), ['trainable_parameters_mask']))}"
        )
    base = {tuple(name.split("/")): value for name, value in loaded.items() if name not in leaves}
    check_base(base, adapters.origin, adapters.path)
    return {name: place(leaf, wanted[name], lambda size: None) for name, leaf in leaves.items()}


def _whole_shapes(kernels: Mapping[str, OnLoad], wanted: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights `wanted`, with the float shapes of `kernels` in place of their stored parts."""
    parts = {part for kernel in kernels.values() for part in kernel.parts}
    shapes = {name: leaf.shape for name, leaf in wanted.items() if name not in parts}
    return shapes | {name: kernel.shape for name, kernel in kernels.items()}


def _listed(paths: Collection[str]) -> str:
    more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
    return ", ".join([*paths][:_MOST_PATHS]) + more


def _initial(config: Config, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns the initial values of the weights `wanted`, as a run without a checkpoint draws them."""
    if not wanted:
        return {}

    def drawn(key: jax.Array) -> dict[str, jax.Array]:
        weights = names_of(joined(*make_model(config).init(key)))
        return {name: weights[name] for name in wanted}

    shardings = {name: leaf.sharding for name, leaf in wanted.items()}
    return jax.jit(drawn, out_shardings=shardings)(seed_key(config.init_weights_seed))
