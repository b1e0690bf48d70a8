"""Opens checkpoints, and recognizes their kinds by their files."""

import contextlib
from pathlib import Path
from typing import Any

import jax

from trainer.backends.base import Model
from trainer.backends.registry import make_model
from trainer.checkpoint.manager import RUN, committed, inspect, newest, refuse_maxtexts, written_by_maxtext
from trainer.checkpoint.sidecar import CONFIG as SIDECAR_CONFIG
from trainer.checkpoint.sidecar import TOKENIZER, Sidecar, read_sidecar, saved_config
from trainer.config.errors import UserError
from trainer.config.family import import_facts
from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.config.tokenizer_files import SETTINGS, VOCABULARIES, is_gguf
from trainer.leaves.about import FIELDS, GENERATION, About
from trainer.leaves.orbax import COMPOSITE, ITEMS
from trainer.leaves.source import Source, joined, names_of
from trainer.observe.rundir import CHECKPOINTS
from trainer.ops.random import seed_key
from trainer.runtime import storage
from trainer.runtime.folders import check_folder
from trainer.weights.adapters import Initial, RunAdapters, WithAdapters
from trainer.weights.gguf.read import GgufSource
from trainer.weights.huggingface.read import CONFIG as HUGGING_FACE_CONFIG
from trainer.weights.huggingface.read import HuggingFaceSource
from trainer.weights.huggingface.weight_files import INDEX, weight_files
from trainer.weights.maxtext.read import MaxTextSource
from trainer.weights.params.read import CONFIG, TREE, ParamsSource
from trainer.weights.peft.read import PeftSource, is_peft


def open_source(
    path: str, decoder_block: str = "", *, average: bool = False, base: str = "", verify: bool = True
) -> Source:
    """Opens the checkpoint at `path`, and recognizes its kind by its files.

    Args:
      path: a path on this machine, or a run in a bucket.
      decoder_block: the family that the user names, if any. The family's `facts` module is imported, because it
        determines the keys on which the parameters depend.
      average: whether to read the parameter average (`ema_decay`), which only checkpoints of runs have.
      base: for an adapter checkpoint, the current path of the base parameters; by default, their path during training.
      verify: whether to compare the checksums of a run's checkpoint. This reads the complete checkpoint, and all
        processes wait for each other.

    Raises:
      UserError: there is no checkpoint, it is damaged, or it lacks the average or the base.
    """
    import_facts(decoder_block)
    if average or "://" in path:
        return _of_run(path, decoder_block, base, average=average, verify=verify)
    folder = local_path(path)
    if is_gguf(folder):
        return GgufSource(folder, decoder_block)
    check_folder(folder, (HUGGING_FACE_CONFIG, INDEX, CONFIG, FIELDS, GENERATION, *VOCABULARIES, *SETTINGS))
    files = [file.name for file in weight_files(folder)]
    if (folder / HUGGING_FACE_CONFIG).is_file() and files:
        check_folder(folder, files)
        return HuggingFaceSource(folder, decoder_block)
    if (folder / TREE).is_dir() and (folder / CONFIG).is_file():
        check_folder(folder, [TREE])
        return ParamsSource(folder)
    if (tree := _maxtexts_tree(folder)) is not None:
        if tree == folder:
            check_folder(folder)
            check_folder(folder.parent, [COMPOSITE])  # this file is read, too
        else:
            check_folder(folder, [str(tree.parent.relative_to(folder))])
        return MaxTextSource(tree, folder)
    if is_peft(folder):
        return _merged(PeftSource(folder), base, decoder_block, verify=verify)
    if newest(folder) is not None:
        return _of_run(path, decoder_block, base, verify=verify)
    state = "there is no such folder" if not folder.is_dir() else "nothing in it is a checkpoint"
    raise UserError(
        f"{path}: {state}; looked for config.json with *.safetensors (Hugging Face), a file *.gguf, {TREE}/ with "
        f"{CONFIG} (written by trainer.export), {CHECKPOINTS}/N or N (a run, here or in MaxText), {ITEMS}/_METADATA "
        "or _METADATA (a MaxText checkpoint)"
    )


def _maxtexts_tree(folder: Path) -> Path | None:
    """Returns the folder of a MaxText checkpoint's parameter tree; None if `folder` is not MaxText's. `folder` may be
    the tree, a checkpoint, or a run, of which the newest checkpoint is used."""
    if (folder / "_METADATA").is_file():
        return folder
    for checkpoint in (folder, *(found[-1] for found in map(committed, (folder, folder / CHECKPOINTS)) if found)):
        if written_by_maxtext(checkpoint):
            return checkpoint / ITEMS
    return None


def open_adapters(path: str, *, average: bool | None = False, verify: bool = True) -> "RunAdapters | PeftSource":
    """Opens the adapters at `path`: a run's folder, one of its checkpoints/N, or a PEFT folder.

    Args:
      average: whether to read averages (`ema_decay`); None: yes if there are any.
      verify: see `open_source`.

    Raises:
      UserError: there are no adapters, or they are damaged.
    """
    if "://" not in path and is_peft(local_path(path)):
        return PeftSource(local_path(path))
    checkpoint = newest(storage.folder(path))
    sidecar = None if checkpoint is None else _sidecar(checkpoint, verify)
    if sidecar is None or sidecar.base is None:
        what = (
            "neither a run with a checkpoint nor a folder of PEFT" if sidecar is None else "it trained all parameters"
        )
        raise UserError(
            f"{path}: no adapters there: {what}; give a run with enable_lora=true, or one of its checkpoints/N"
        )
    found = RunAdapters(checkpoint, sidecar)
    averaged = found.averaged if average is None else average
    return RunAdapters(checkpoint, sidecar, average=True) if averaged else found


def _merged(adapters: "RunAdapters | PeftSource", base: str, decoder_block: str, *, verify: bool) -> Source:
    place = base or adapters.origin.path
    if not place and isinstance(adapters, RunAdapters):
        return WithAdapters(Initial(adapters, _drawn), adapters, weight_shapes)
    if "://" not in place and not (place and local_path(place).exists()):
        named = f"the parameters in {place}" if place else "parameters at an unknown path"
        raise UserError(
            f"{adapters.path}: its adapters belong to {named}, which cannot be found; give their path with "
            "load_parameters_path"
        )
    return WithAdapters(open_source(place, decoder_block, verify=verify), adapters, weight_shapes)


def _drawn(config: Config) -> dict[str, jax.Array]:
    return names_of(joined(*jax.jit(make_model(config).init)(seed_key(config.init_weights_seed))))


def _sidecar(checkpoint: Any, verify: bool) -> Sidecar:
    if verify:
        return inspect(checkpoint)
    refuse_maxtexts(checkpoint)
    return read_sidecar(checkpoint / RUN)


def _of_run(
    path: str, decoder_block: str = "", base: str = "", *, average: bool = False, verify: bool = True
) -> Source:
    if (checkpoint := newest(storage.folder(path))) is not None:
        sidecar = _sidecar(checkpoint, verify)
        if sidecar.base is not None:
            return _merged(RunAdapters(checkpoint, sidecar, average=average), base, decoder_block, verify=verify)
        source = ParamsSource(checkpoint, "", f"{RUN}/{SIDECAR_CONFIG}", f"{RUN}/{TOKENIZER}", average=average)
        if not (source.tokenizer / FIELDS).is_file():
            source.about, source.lacks = _about_start(sidecar, checkpoint, source.about)
        return source
    if average:
        raise UserError(
            f"{path}: no run with a checkpoint there, and only a run contains averaged parameters; leave out "
            "weights=ema"
        )
    raise UserError(
        f"{path}: no run with a checkpoint there; from a bucket, only a run's folder or one of its "
        "checkpoints/N can be read: copy other checkpoints to this machine"
    )


def _about_start(sidecar: Sidecar, checkpoint: Any, own: About) -> tuple[About, str]:
    """Returns an `About` for a run that was saved without one, and a line about its source.

    The `About` is that of the folder from which the run began, or `own` if the folder cannot be read. The line is "" if
    the run began without such a folder.
    """
    place, begun = saved_config(sidecar, checkpoint).get("load_parameters_path", ""), "its tokenizer"
    if not place:
        return own, ""
    if "://" not in place and local_path(place).exists():
        with contextlib.suppress(UserError):  # the folder may no longer contain a model
            own, begun = open_source(place, verify=False).about, place
    return own, (
        f"{checkpoint} was saved by an earlier version, which did not save the settings in its model's folder: the "
        f"tokens that end a text are those of {begun}, without the end of a turn; a run that is resumed keeps all of it"
    )


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights (`leaves.source.joined`), by canonical name. Nothing is allocated."""
    return weights_of(make_model(config))[0]


def weights_of(model: Model) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """Returns the shapes of the model's weights, like `weight_shapes`, and the names of the weights that are not
    parameters but state that is not trained by gradients."""
    params, rest = model.abstract
    shapes = {name: leaf.shape for name, leaf in names_of(joined(params, rest)).items()}
    return shapes, frozenset(names_of(rest))
