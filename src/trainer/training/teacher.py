"""The teacher of distillation: a model with its own configuration, on the mesh of the student."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from trainer.backends.registry import make_model
from trainer.config.capabilities.data_keys import without_rows
from trainer.config.capabilities.distillation_keys import SHARED
from trainer.config.capabilities.documents import OF_ROWS
from trainer.config.capabilities.token_keys import token_files
from trainer.config.dump import as_words
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.load import Loaded, load
from trainer.config.resolve import resolve
from trainer.config.tokenizer_files import has_tokenizer
from trainer.data.tokenizer_files import load_tokenizer
from trainer.data.vocabularies import shared_tokens
from trainer.leaves.source import joined, parted
from trainer.models.families import axis_rules, forward_flops_per_token
from trainer.objectives.base import Frozen
from trainer.objectives.distillation import PARAMS, REST, Teacher
from trainer.objectives.registry import make_tiling
from trainer.runtime.storage import is_remote
from trainer.sharding import Rules, hardware
from trainer.weights.load import load_parameters
from trainer.weights.model_keys import load_model_keys
from trainer.weights.open import open_source

_PLACE, _RULES = "teacher_path", "logical_axis_rules"
_PRESET = "teacher_overrides={model_name: NAME}"
_MODULES = "mtp_num_layers"  # the student learns nothing from modules of multi-token prediction


def make_teacher(config: Config, devices: Sequence[jax.Device], rules: Rules) -> tuple[Teacher, Rules]:
    """Returns the teacher of `config`, the student's resolved configuration, and `rules`, the student's, with the rules
    of the teacher's family. No weights are read.

    Raises:
      UserError: there is no such model, or it does not fit the mesh.
    """
    own, averaged = teacher_config(config, devices)
    model = make_model(own)
    (params, rest), tokens = model.abstract, min(config.vocab_size, own.vocab_size)
    frozen = Frozen(
        {PARAMS: params, REST: rest},
        {PARAMS: model.param_axes, REST: model.rest_axes},
        functools.partial(_loaded, own, averaged),
        place=_PLACE,
        on_host=config.teacher_memory_host_offload,
        flops=forward_flops_per_token(own, params),
    )
    return Teacher(
        apply=model.apply,
        frozen=frozen,
        tokens=tokens if config.distill_vocab_size < 0 else min(tokens, config.distill_vocab_size),
        vocab_size=own.vocab_size,
        tiling=make_tiling(own, model),
    ), _joint(rules, axis_rules(own), own.decoder_block)


def _joint(student: Rules, teacher: Rules, block: str) -> Rules:
    if different := [name for name, axes in teacher.items() if student.get(name, axes) != axes]:
        raise UserError(
            f"decoder_block={block} of the teacher: its axis {different[0]} has another rule in the student"
        )
    return {**teacher, **student}


def teacher_config(config: Config, devices: Sequence[jax.Device]) -> tuple[Config, bool]:
    """Returns the teacher's resolved configuration, and whether its weights are the averages of a run (`ema_decay`)."""
    overrides: Any = {"dtype": config.dtype, _MODULES: 0, **config.teacher_overrides}
    overrides.setdefault("weight_dtype", overrides["dtype"])  # no update needs more precision
    path, averaged = config.teacher_path, False
    words = as_words(config, [name for name in SHARED if name != _RULES]) + as_words(overrides)
    try:
        if path:
            source = open_source(path, str(overrides.get("decoder_block", "")), verify=False)
            if not source.keys and "model_name" not in overrides:
                raise UserError(f"{path} does not contain its model's keys; name its preset: {_PRESET}")
            keys, averaged = source.keys, source.averaged
            loaded = load_model_keys(keys, [*words, f"load_parameters_path={path}"], path, lambda line: None)
        elif config.teacher_overrides:
            loaded = load(["base.yml", "dataset_type=synthetic", *words], defaults=without_rows(words))
        else:
            raise UserError(f"there is no teacher; give its folder, or to compile without one: {_PRESET}")
        # Kernels rely on the number of documents in a row.
        of_student = {name: config[name] for name in (_RULES, *OF_ROWS)}
        return resolve({**loaded.config, **of_student}, **hardware(devices)), averaged
    except UserError as error:
        raise UserError(f"{_PLACE}={path}: {error}") from error


def of_tokenizers(loaded: Loaded, say: Callable[[str], None]) -> dict[str, Any]:
    """Compares the tokenizers of student and teacher, and returns the keys that follow: distill_vocab_size if one
    vocabulary contains the other, and tokenizer_path, the teacher's, if the student has no tokenizer.

    Raises:
      UserError: the vocabularies differ.
    """
    config, found = loaded.config, dict[str, Any]()
    if config.distill_vocab_size >= 0 or config.dataset_type == "synthetic":
        return found
    place = open_source(config.teacher_path, config.teacher_overrides.get("decoder_block", ""), verify=False).tokenizer
    if is_remote(place) or not has_tokenizer(place, "auto"):
        say(f"warning: {place} has no tokenizer: that the student has the same vocabulary is not checked")
        return found
    path = loaded.tokenizer or config.tokenizer_path
    if not path and config.tokenizer_type != "bytes":
        if token_files(config):
            say("warning: tokenizer_path is empty: that the student has the teacher's vocabulary is not checked")
            return found
        path = found["tokenizer_path"] = str(place)
        say(f"tokenizer_path={path}: the tokenizer of the teacher, because the student has none")
    ends = {"add_bos": config.add_bos, "add_eos": config.add_eos}
    shared = shared_tokens(
        load_tokenizer(path, config.tokenizer_type, **ends), load_tokenizer(str(place), "auto", **ends)
    )
    if shared.note:
        say(shared.note)
    return found | ({"distill_vocab_size": shared.tokens} if shared.student != shared.teacher else {})


def _loaded(config: Config, averaged: bool, abstract: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """Implements `Frozen.make`."""
    path, wanted = config.load_parameters_path, joined(abstract[PARAMS], abstract[REST])
    weights = load_parameters(path, config, wanted, lambda line: say(f"teacher: {line}"), {_MODULES}, average=averaged)
    return dict(zip((PARAMS, REST), parted(weights, abstract[REST]), strict=True))
