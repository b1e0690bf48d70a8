"""`load_parameters_path`: recognizes the kind of a checkpoint and loads its parameters onto the devices."""

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from trainer.backends import make_model
from trainer.checkpoint.adapted import Adapters, Initial, Merged, RunAdapters
from trainer.checkpoint.adapters import check_base
from trainer.checkpoint.description import check_same_model
from trainer.checkpoint.huggingface import CONFIG as HUGGING_FACE_CONFIG
from trainer.checkpoint.huggingface import INDEX, HuggingFaceSource, weight_files
from trainer.checkpoint.manager import RUN, committed, inspect, newest, refuse_maxtexts, written_by_maxtext
from trainer.checkpoint.maxtext import ITEMS, MaxTextSource
from trainer.checkpoint.orbax import COMPOSITE
from trainer.checkpoint.params import CONFIG, NEUTRAL, TREE, ParamsSource
from trainer.checkpoint.placing import place, place_quantized
from trainer.checkpoint.sidecar import CONFIG as SIDECAR_CONFIG
from trainer.checkpoint.sidecar import TOKENIZER, read_sidecar
from trainer.checkpoint.source import DTYPES, Source, filled, joined, names_of, progress
from trainer.checkpoint.stored import quantized_on_load
from trainer.checkpoint.tokenizer import FILES as TOKENIZER_FILES
from trainer.config import Config, UserError
from trainer.config.dump import as_words
from trainer.config.family import import_facts
from trainer.config.lora_keys import ADAPTER, ALPHA, ENABLE, PATTERN, RANK, RESTORE
from trainer.config.paths import local_path
from trainer.models.optional import lacking
from trainer.observe.rundir import CHECKPOINTS
from trainer.ops.random import seed_key
from trainer.runtime import storage
from trainer.runtime.folders import check_folder

_SHORT = 2.0  # seconds; loading that takes longer is reported
_MOST_PATHS = 12  # of a line


def open_source(
    path: str, decoder_block: str = "", *, average: bool = False, base: str = "", verify: bool = True
) -> Source:
    """Opens the checkpoint at `path`, whose kind is recognized by its files.

    Args:
      path: a path on this machine, or of a run in a bucket.
      decoder_block: the family that the user names, if there is one. Its facts are imported: they say which keys of the
        checkpoint its parameters depend on.
      average: whether to read the parameter average (`ema_decay`), which only checkpoints of runs have.
      base: for a checkpoint of adapters, where the parameters that they belong to are now; by default, where they were.
      verify: whether to compare the checksums of a run's checkpoint, for which all of it is read, and in which all
        processes wait for each other.

    Raises:
      UserError: there is no checkpoint, it is damaged, or it has no average; or there is no base.
    """
    import_facts(decoder_block)
    if average or "://" in path:
        return _of_run(path, decoder_block, base, average=average, verify=verify)
    folder = local_path(path)
    check_folder(folder, (HUGGING_FACE_CONFIG, INDEX, CONFIG, NEUTRAL, *TOKENIZER_FILES))
    if (folder / HUGGING_FACE_CONFIG).is_file() and (files := weight_files(folder)):
        check_folder(folder, [file.name for file in files])
        return HuggingFaceSource(folder, decoder_block)
    if (folder / TREE).is_dir() and (folder / CONFIG).is_file():
        check_folder(folder, [TREE])
        return ParamsSource(folder)
    if (tree := _maxtexts_tree(folder)) is not None:
        if tree == folder:
            check_folder(folder)
            check_folder(folder.parent, [COMPOSITE])  # read, too
        else:
            check_folder(folder, [str(tree.parent.relative_to(folder))])
        return MaxTextSource(tree, folder)
    if newest(folder) is not None:
        return _of_run(path, decoder_block, base, verify=verify)
    state = "there is no such folder" if not folder.is_dir() else "nothing in it is a checkpoint"
    raise UserError(
        f"{path}: {state}; looked for config.json with *.safetensors (Hugging Face), {TREE}/ with {CONFIG} "
        f"(written by trainer.export), {CHECKPOINTS}/N or N (a run, here or in MaxText), {ITEMS}/_METADATA or "
        "_METADATA (a MaxText checkpoint)"
    )


def _maxtexts_tree(folder: Path) -> Path | None:
    """Returns the parameter tree of a MaxText checkpoint, for a run's folder of its newest one; None without one."""
    if (folder / "_METADATA").is_file():
        return folder
    for checkpoint in (folder, *(found[-1] for found in map(committed, (folder, folder / CHECKPOINTS)) if found)):
        if written_by_maxtext(checkpoint):
            return checkpoint / ITEMS
    return None


def open_adapters(path: str) -> Adapters:
    """Opens the adapters at `path`: of a run's folder or one of its checkpoints/N.

    Raises:
      UserError: there are none, or they are damaged.
    """
    checkpoint = newest(storage.folder(path))
    sidecar = None if checkpoint is None else inspect(checkpoint)
    if sidecar is None or sidecar.base is None:
        what = "there is no run with a checkpoint" if sidecar is None else "this run trained all parameters"
        raise UserError(f"{RESTORE}={path}: {what}; give a run with {ENABLE}=true, or one of its checkpoints/N")
    return RunAdapters(checkpoint, sidecar)


def _merged(adapters: RunAdapters, base: str, decoder_block: str, *, verify: bool) -> Source:
    place = base or adapters.base.path
    if not place:
        return Merged(Initial(adapters, _drawn), adapters, weight_shapes)
    if "://" not in place and not local_path(place).is_dir():
        raise UserError(
            f"{adapters.path}: its adapters belong to the parameters in {place}, and there is no such folder; give its "
            "place now with load_parameters_path"
        )
    return Merged(open_source(place, decoder_block, verify=verify), adapters, weight_shapes)


def _drawn(config: Config) -> dict[str, jax.Array]:
    return names_of(joined(*jax.jit(make_model(config).init)(seed_key(config.init_weights_seed))))


def _of_run(
    path: str, decoder_block: str = "", base: str = "", *, average: bool = False, verify: bool = True
) -> Source:
    if (checkpoint := newest(storage.folder(path))) is not None:
        if verify:
            sidecar = inspect(checkpoint)
        else:
            refuse_maxtexts(checkpoint)
            sidecar = read_sidecar(checkpoint / RUN)
        if sidecar.base is not None:
            return _merged(RunAdapters(checkpoint, sidecar, average=average), base, decoder_block, verify=verify)
        return ParamsSource(checkpoint, "", f"{RUN}/{SIDECAR_CONFIG}", f"{RUN}/{TOKENIZER}", average=average)
    if average:
        raise UserError(
            f"{path}: no run with a checkpoint there, and only a run contains averaged parameters; leave out "
            "weights=ema"
        )
    raise UserError(
        f"{path}: no run with a checkpoint there; from a bucket, only a run's folder or one of its "
        "checkpoints/N can be read: copy other checkpoints to this machine"
    )


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the canonical names of a model's weights (`source.joined`) with their shapes. Nothing is allocated."""
    return weights_of(config)[0]


def weights_of(config: Config) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """Returns `weight_shapes`, and which of these weights are not parameters: the model's state without gradient."""
    params, rest = make_model(config).abstract
    shapes = {name: leaf.shape for name, leaf in names_of(joined(params, rest)).items()}
    return shapes, frozenset(names_of(rest))


def load_parameters(
    path: str,
    config: Config,
    abstract: Any,
    say: Callable[[str], Any],
    given: Collection[str] = (),
    *,
    average: bool = False,
) -> Any:
    """Loads the weights at `path` onto the devices, and adapters from lora_restore_path. Weights that `path` may lack
    (`models.optional`) and does lack get their initial values, drawn from `init_weights_seed`.

    At any time, a host holds one device's slice of one layer of one parameter. For an Orbax tree it holds all chunks of
    one parameter that overlap its devices' slices.

    Args:
      path: see `open_source`.
      config: resolved; the checkpoint must hold the same model.
      abstract: the weights that the model needs (`source.joined`), a ShapeDtypeStruct with a sharding at each leaf.
      say: gets one line if loading takes long, one for each allowed difference, and two if weights are lacking.
      given: keys of the command line, which may define another function than the checkpoint's; see
        `description.FREE`.
      average: see `open_source`.

    Raises:
      UserError: there is no checkpoint, it has another model, or tensors are missing, unexpected or have a wrong shape.
        Raised before any values are read.
    """
    started = time.perf_counter()
    source = open_source(path, config.decoder_block, average=average)
    wanted = names_of(abstract)
    check_same_model(source.keys, config, str(source.path), given, say)
    own = [name for name in wanted if config[ENABLE] and ADAPTER.search(name)]
    shapes = {name: leaf.shape for name, leaf in wanted.items() if name not in own}
    kernels = quantized_on_load(config)
    parts = {part for kernel in kernels.values() for part in kernel.parts}
    shapes = {name: shape for name, shape in shapes.items() if name not in parts}
    shapes |= {name: kernel.shape for name, kernel in kernels.items()}
    groups = lacking(config, shapes, lambda names: source.held(config, {name: shapes[name] for name in names}))
    new = [name for names in groups.values() for name in names]
    leaves = source.leaves(config, {name: shape for name, shape in shapes.items() if name not in new})
    for name, leaf in leaves.items():
        stored, needed = leaf.dtype.name, DTYPES[0] if name in kernels else wanted[name].dtype.name
        if stored != needed and not {stored, needed} <= {*DTYPES}:
            raise UserError(f"{source.path}: {name}: stored as {stored}, wanted {needed}: only floats can be cast")
    stretched = 0 if config.rope_type == "default" else config.rope_factor * config.original_max_position_embeddings
    if source.length and config.max_target_length > max(source.length, stretched):
        say(
            f"warning: max_target_length={config.max_target_length} is beyond the {source.length} positions that the "
            f"model at {path} was trained for: caches and activations grow with it, and text at later positions may "
            "be poor"
        )
    for note in source.notes(config):
        say(note)
    if groups:
        say(f"{source.path}: loaded: {_listed(dict.fromkeys('/'.join(name.split('/')[:2]) for name in leaves))}")
        say(f"{source.path}: absent, with initial values: {_listed(groups)}")
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
    if config[ENABLE] and config[RESTORE]:
        loaded |= _restored_adapters(config, wanted, loaded)
    return filled(abstract, loaded)


def _restored_adapters(config: Config, wanted: Mapping[str, Any], loaded: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns the weights at lora_restore_path, for a model with the weights `loaded`."""
    adapters = open_adapters(config[RESTORE])
    keys = adapters.keys(config)
    if wrong := [name for name in (RANK, ALPHA, PATTERN) if keys[name] != config[name]]:
        raise UserError(
            f"{RESTORE}={config[RESTORE]}: its adapters are not those of the configuration "
            f"({' '.join(as_words(config, wrong))}); give {' '.join(as_words(keys, wrong))}"
        )
    leaves = adapters.leaves(config, {name: leaf.shape for name, leaf in wanted.items()})
    base = {tuple(name.split("/")): value for name, value in loaded.items() if name not in leaves}
    check_base(base, adapters.base, adapters.path)
    return {name: place(leaf, wanted[name], lambda size: None) for name, leaf in leaves.items()}


def _listed(paths: Collection[str]) -> str:
    more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
    return ", ".join([*paths][:_MOST_PATHS]) + more


def _initial(config: Config, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns the initial values of these weights, as a run without a checkpoint draws them."""
    if not wanted:
        return {}

    def drawn(key: jax.Array) -> dict[str, jax.Array]:
        weights = names_of(joined(*make_model(config).init(key)))
        return {name: weights[name] for name in wanted}

    shardings = {name: leaf.sharding for name, leaf in wanted.items()}
    return jax.jit(drawn, out_shardings=shardings)(seed_key(config.init_weights_seed))
