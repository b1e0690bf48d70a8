"""Reads the model's keys from the checkpoint at load_parameters_path, for a command that does not define a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.manager import RUN, newest, written_by_maxtext
from trainer.checkpoint.sidecar import CONFIG, TOKENIZER, read_config
from trainer.config.capabilities.quantization_keys import OF_STORED
from trainer.config.capabilities.token_keys import token_files
from trainer.config.dump import as_words
from trainer.config.errors import UserError
from trainer.config.files import by_hand
from trainer.config.flags import FLAGS
from trainer.config.from_model import FROM_A_MODEL
from trainer.config.keys import Config
from trainer.config.load import Begun, Description, Loaded
from trainer.config.paths import local_path
from trainer.config.saved import read_saved
from trainer.config.schema import schema
from trainer.config.tokenizer_files import has_tokenizer
from trainer.config.trust import code_of_checkpoint
from trainer.leaves.source import Source
from trainer.observe.runs import runs_to_resume
from trainer.runtime import storage
from trainer.runtime.agreement import agreed
from trainer.runtime.folders import read_bounded
from trainer.runtime.storage import files_below, is_remote, mirror
from trainer.weights.model_keys import MODEL, check_same_model, resolved_alone
from trainer.weights.open import open_adapters, open_source
from trainer.weights.teacher_files import with_teacher

_ADAPTERS = (
    "lora_rank",
    "lora_alpha",
    "lora_module_path",
    "trainable_parameters_mask",
)  # taken from lora_restore_path if the user gives none of them
_SHOWN = ("decoder_block", "base_num_decoder_layers", "base_emb_dim", "vocab_size")  # named in the line about the model


def with_model(begun: Begun) -> Loaded:
    """Returns the configuration of `begun`, completed with the keys of the model at `begun.path` and with the teacher's
    keys. Every process must call this before any other function that waits for other processes.

    A run with a name and a checkpoint continues from the checkpoint, so it uses the checkpoint's model, and
    load_parameters_path is not read. A command without run_name reads load_parameters_path; only
    if that is not possible does it use the checkpoint of a run that started from the same path.

    Quantized weights are trained as floats, so keys for their storage are omitted.

    Raises:
      UserError: there is no checkpoint; its model contradicts the user's keys; one of its keys names code to import,
        and the user does not set that key; or another process raised this error.
    """
    return agreed(lambda: with_teacher(_with_model(begun) if begun.path else begun.end()))


def _with_model(begun: Begun) -> Loaded:
    named = bool(begun.config.run_name)
    if named and (own := _of_own_run(begun)):
        return begun.end(own)
    try:
        decoder_block = begun.config.decoder_block if "decoder_block" in begun.given else ""
        source = open_source(begun.path, decoder_block, verify=False)
        keys = source.keys
    except UserError as error:
        if not named and (own := _of_own_run(begun)):
            return begun.end(own)
        raise UserError(
            f"{error}\n  the model's keys are read from this path, because model_name is not given"
        ) from error
    if not keys:
        return begun.end()
    where = f"load_parameters_path={begun.path}"
    if code := code_of_checkpoint(keys, begun.given, where):
        raise UserError("\n  ".join(code))
    ours = {name: value for name, value in keys.items() if name not in OF_STORED}
    said = ", ".join(as_words(ours, [name for name in _SHOWN if name in ours]))
    tokenizer, notes = _tokenizer(source, begun)
    lines = [f"{where} gives the model's keys: {said}", *notes]
    if adapters := _adapters(begun, ours):
        said = ", ".join(as_words(adapters))
        lines.append(f"lora_restore_path={begun.config.lora_restore_path} gives its adapters' keys: {said}")
    loaded = begun.end(Description(ours | tokenizer | adapters, where, notes=lines))
    # Loading the parameters repeats this check, after the data have been prepared.
    model = resolved_alone(
        as_words(loaded.config, [*FLAGS, "max_target_length", *(key for key in schema().keys if key in MODEL)])
    )
    given = [name for name, setting in begun.given.items() if by_hand(setting.where)]
    check_same_model(keys, model, str(source.path), given, say=lambda line: None)
    return loaded


def _adapters(begun: Begun, model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of the adapters at lora_restore_path; {} without LoRA, or if the user gives any of
    `_ADAPTERS`."""
    if not _describes_adapters(begun):
        return {}
    keys = open_adapters(begun.config.lora_restore_path, verify=False).lora_keys(resolved_alone(as_words(model)))
    return {name: keys[name] for name in _ADAPTERS if name in keys}


def _describes_adapters(begun: Begun) -> bool:
    return bool(begun.config.enable_lora and begun.config.lora_restore_path) and begun.given.keys().isdisjoint(
        _ADAPTERS
    )


def _tokenizer(source: Source, begun: Begun) -> tuple[dict[str, str], list[str]]:
    """Returns the keys of the checkpoint's tokenizer ({} if it must not be used), and lines about the tokenizer."""
    config = begun.config
    kind = config.tokenizer_type if "tokenizer_type" in begun.given else "auto"
    if config.dataset_type == "synthetic" or "tokenizer_path" in begun.given or kind == "bytes":
        return {}, []
    if not is_remote(source.tokenizer) and has_tokenizer(source.tokenizer, kind):
        path = str(source.tokenizer)
        return {"tokenizer_path": path, "tokenizer_type": kind}, [
            f"tokenizer_path={path}: the tokenizer of the model, because none is given"
        ]
    if token_files(config) or not config.tokenize_train_data or config.tokenizer_path:
        return {}, []
    why = (
        "is in a bucket; copy it to this machine"
        if is_remote(source.tokenizer)
        else f"has no tokenizer of tokenizer_type={kind}"
    )
    return {}, [
        f"warning: tokenizer_path is empty, and {source.tokenizer} {why}: a tokenizer is trained on the data, "
        "and the model has never seen its tokens"
    ]


def keys_of_run(path: str) -> Mapping[str, Any]:
    """Returns the keys in the newest checkpoint of the run at `path`; {} if there is no run.

    Raises:
      UserError: the keys cannot be read.
    """
    checkpoint = newest(storage.folder(path))
    if checkpoint is None or written_by_maxtext(checkpoint):
        return {}
    return read_saved(read_config(checkpoint / RUN), str(checkpoint / RUN / CONFIG))


def own_run(config: Config, path: str) -> tuple[Mapping[str, Any], Any] | None:
    """Returns (keys, checkpoint) for the newest checkpoint of the run that this command continues; None if there is no
    such checkpoint. A command without a run name continues the run that started from `path`.

    Raises:
      UserError: the keys cannot be read.
    """
    if not config.enable_checkpointing:
        return None
    for folder in runs_to_resume(config.base_output_directory, config.run_name):
        checkpoint = newest(folder)
        if checkpoint is None or written_by_maxtext(checkpoint):
            continue
        saved = read_saved(read_config(checkpoint / RUN), str(checkpoint / RUN / CONFIG))
        if config.run_name or saved.get("load_parameters_path") == path:
            return saved, checkpoint
    return None


def _of_own_run(begun: Begun) -> Description | None:
    """Returns the description of the checkpoint that `own_run` returns; None if there is none."""
    own = own_run(begun.config, begun.path)
    return own and _of_saved(*own, begun)


def _of_saved(saved: Mapping[str, Any], checkpoint: Any, begun: Begun) -> Description:
    config, where = begun.config, str(checkpoint)
    if code := code_of_checkpoint({name: saved[name] for name in MODEL & saved.keys()}, begun.given, where):
        raise UserError("\n  ".join(code))
    kept = {*MODEL, *(() if "tokenizer_path" in begun.given else ("tokenizer_path",)), "tokenizer_type"}.difference(
        OF_STORED, begun.given
    )
    # Earlier versions had other defaults for these keys; a run keeps its original defaults.
    kept |= {name for defaults in FROM_A_MODEL.values() for name in defaults}.difference(begun.given)
    kept |= {*_ADAPTERS} if _describes_adapters(begun) else set()
    keys = {name: value for name, value in saved.items() if name in kept}
    notes = [
        f"{where}: the model's keys come from this run's own checkpoint; load_parameters_path={begun.path} is not read"
    ]
    path, copy = config.tokenizer_path if "tokenizer_path" in begun.given else saved.get("tokenizer_path", ""), ""
    if path and path == saved.get("tokenizer_path") and _used(config) and not local_path(path).exists():
        copy = str(_local(checkpoint / RUN / TOKENIZER))
        notes.append(f"tokenizer_path={path} is gone: the tokenizer in {checkpoint / RUN / TOKENIZER} is used")
    return Description(keys, where, copy, notes)


def _used(config: Config) -> bool:
    return config.dataset_type != "synthetic" and config.tokenizer_type != "bytes"


def _local(folder: Any) -> Path:
    """Returns `folder`, or a copy on this machine if it is in a bucket."""
    if not is_remote(folder):
        return folder
    local = mirror(folder)
    for name in files_below(folder):
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_bytes(read_bounded(folder / name))
    return local
