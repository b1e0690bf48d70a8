"""Reads the teacher of distillation: the keys, the tokenizer and the weights in the folder teacher_path."""

from collections.abc import Callable
from typing import Any

from trainer.config.capabilities.data_keys import without_rows
from trainer.config.capabilities.token_keys import token_files
from trainer.config.dump import as_words
from trainer.config.errors import UserError
from trainer.config.flags import FLAGS
from trainer.config.keys import Config
from trainer.config.load import Loaded, load
from trainer.config.schema import schema
from trainer.config.shared_keys import SHARED
from trainer.config.tokenizer_files import has_tokenizer
from trainer.data.teacher_logits import SavedLogits
from trainer.data.tokenizer_files import load_tokenizer
from trainer.data.vocabularies import shared_tokens
from trainer.leaves.source import Source, joined, parted
from trainer.objectives.distillation import PARAMS, REST
from trainer.runtime.storage import is_remote
from trainer.weights.load import load_parameters
from trainer.weights.model_keys import MODEL, load_model_keys
from trainer.weights.open import open_source

_PRESET = "teacher_overrides={model_name: NAME}"
_MODULES = "mtp_num_layers"  # the student learns nothing from the teacher's multi-token prediction modules
_ALWAYS = ("decoder_block", "vocab_size")
# The student's keys that the check of the teacher's model uses. Checking other shared keys would require the devices.
_CHECKED = (*FLAGS, "max_target_length", "packing", "batch_invariant")


def teacher_keys(config: Config) -> dict[str, Any]:
    """Returns the value of teacher_overrides, completed with the keys of the model at teacher_path or, if this is
    empty, of the preset in teacher_overrides.

    Raises:
      UserError: there is no such model, or the keys contradict it.
    """
    given, path = dict[str, Any](config.teacher_overrides), config.teacher_path
    if not path and not given:
        return {}  # `build` raises an error for this
    words = as_words(config, _CHECKED) + as_words({_MODULES: 0, **given})
    try:
        if path:
            source = _source(config)
            if not source.keys and "model_name" not in given:
                raise UserError(f"{path} does not contain its model's keys; name its preset: {_PRESET}")
            own = load_model_keys(source.keys, [*words, f"load_parameters_path={path}"], path, lambda line: None).config
        else:
            own = load(["base.yml", "dataset_type=synthetic", *words], defaults=without_rows(words)).config
    except UserError as error:
        raise UserError(f"the teacher: {error}") from error
    names = [name for name, key in schema().keys.items() if name in MODEL and own[name] != key.default]
    return {name: own[name] for name in sorted({*_ALWAYS, *names, *given} - {"model_name", _MODULES, *SHARED})}


def with_teacher(loaded: Loaded) -> Loaded:
    """Returns `loaded`. With use_distill, the keys of the teacher or of its saved logits are added."""
    config = loaded.config
    if config.use_distill and config.teacher_logits_path:
        loaded.complete(_keys_of_logits(config))
    elif config.use_distill:
        loaded.complete({"teacher_overrides": teacher_keys(config)})
    return loaded


def _keys_of_logits(config: Config) -> dict[str, Any]:
    """Returns the keys that the logits at teacher_logits_path determine."""
    facts, shared = SavedLogits(config.teacher_logits_path).facts, config.distill_vocab_size
    here: dict[str, tuple[Any, Any]] = {}
    if not facts.whole:
        here["distill_temperature"] = (facts.temperature, config.distill_temperature)
        here["distill_temperature_schedule"] = ("constant", config.distill_temperature_schedule)
    tokens = facts.tokens
    if facts.whole:  # all logits were saved, so any part of the vocabulary can be compared
        tokens = min(config.vocab_size, facts.vocab_size if shared < 0 else shared)
    elif shared >= 0 or config.vocab_size < tokens:
        here["distill_vocab_size"] = (tokens, min(config.vocab_size, shared if shared >= 0 else tokens))
    if wrong := [
        f"{key} is {there} in the saved logits and {now} in this run"
        for key, (there, now) in here.items()
        if there != now
    ]:
        raise UserError(f"teacher_logits_path={config.teacher_logits_path}: {'; '.join(wrong)}")
    model = {"vocab_size": facts.vocab_size, "dtype": facts.dtype}
    return {"teacher_overrides": model, "teacher_logits_k": facts.k, "distill_vocab_size": tokens}


def keys_of_tokenizers(loaded: Loaded, say: Callable[[str], None]) -> dict[str, Any]:
    """Compares the tokenizers of student and teacher, and returns the resulting keys: distill_vocab_size if one
    vocabulary contains the other, and the teacher's tokenizer_path if the student has no tokenizer.

    Raises:
      UserError: the vocabularies differ.
    """
    config, found = loaded.config, dict[str, Any]()
    if config.dataset_type == "synthetic" or config.teacher_logits_path:
        return found
    place, path = _source(config).tokenizer, loaded.tokenizer or config.tokenizer_path
    there = not is_remote(place) and has_tokenizer(place, "auto")
    why = f"{place} is in a bucket and not read" if is_remote(place) else f"{place} has no tokenizer"
    if not path and config.tokenizer_type != "bytes":
        if token_files(config):
            say("warning: tokenizer_path is empty, so the student's vocabulary is not compared with the teacher's")
            return found
        if not there:
            raise UserError(f"tokenizer_path is empty, and {why}; give the teacher's tokenizer, tokenizer_path=FOLDER")
        path = found["tokenizer_path"] = str(place)
        say(f"tokenizer_path={path}: the tokenizer of the teacher, because the student has none")
    if config.distill_vocab_size >= 0:
        return found
    if not there:
        say(f"warning: {why}, so the vocabularies of student and teacher are not compared")
        return found
    ends = {"add_bos": config.add_bos, "add_eos": config.add_eos}
    student, teacher = load_tokenizer(path, config.tokenizer_type, **ends), load_tokenizer(str(place), "auto", **ends)
    shared = shared_tokens(student, teacher, (f"tokenizer_path={path}", f"the teacher's tokenizer {place}"))
    if shared.note:
        say(shared.note)
    return found | ({"distill_vocab_size": shared.tokens} if shared.student != shared.teacher else {})


def load_teacher(path: str, config: Config, abstract: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the weights of the teacher at `path`, divided into the two entries of `abstract` (PARAMS and REST).

    `config`: the teacher's resolved configuration. `abstract`: the shapes and shardings of the weights.
    """
    averaged = open_source(path, config.decoder_block, verify=False).averaged  # for a run with ema_decay
    wanted, name = joined(abstract[PARAMS], abstract[REST]), f"{path}: the teacher"
    weights = load_parameters(path, config, wanted, lambda line: say(f"{name}: {line}"), {_MODULES}, average=averaged)
    return dict(zip((PARAMS, REST), parted(weights, abstract[REST]), strict=True))


def _source(config: Config) -> Source:
    block = str(config.teacher_overrides.get("decoder_block", ""))
    return open_source(config.teacher_path, block, verify=False)
