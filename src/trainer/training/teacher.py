"""The teacher of distillation: a model with its own configuration, on the mesh of the student."""

from collections.abc import Sequence

import jax

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.resolve import resolve
from trainer.config.shared_keys import teacher_values
from trainer.models.families import axis_rules, forward_flops_per_token
from trainer.objectives.base import Frozen
from trainer.objectives.distillation import PARAMS, REST, Teacher
from trainer.objectives.registry import make_tiling
from trainer.objectives.saved_logits import SavedTeacher, saved_fields
from trainer.sharding import Rules, hardware


def make_teacher(config: Config, devices: Sequence[jax.Device], rules: Rules) -> tuple[Teacher | SavedTeacher, Rules]:
    """Returns the teacher, and `rules` extended by the sharding rules of the teacher's family. Reads no weights.

    If teacher_logits_path is set, saved logits replace the teacher model.

    Args:
      config: the student's resolved configuration.
      devices: the devices of the run.
      rules: the student's sharding rules.

    Raises:
      UserError: `config` does not contain the teacher's keys (`weights.teacher_files`), or the teacher does not
        fit the mesh or the student.
    """
    if config.teacher_logits_path:
        return _saved(config), rules
    own = _teacher_config(config, devices)
    model = make_model(own)
    (params, rest), tokens = model.abstract, min(config.vocab_size, own.vocab_size)
    if config.distill_vocab_size > tokens:
        raise UserError(f"distill_vocab_size={config.distill_vocab_size}: one of the models has only {tokens} tokens")
    frozen = Frozen(
        {PARAMS: params, REST: rest},
        {PARAMS: model.param_axes, REST: model.rest_axes},
        make=None,
        place="teacher_path",
        on_host=config.teacher_memory_host_offload,
        flops=forward_flops_per_token(own, params),
    )
    return Teacher(
        config=own,
        apply=model.apply,
        frozen=frozen,
        tokens=tokens if config.distill_vocab_size < 0 else config.distill_vocab_size,
        tiling=make_tiling(own, model),
    ), _joint(rules, axis_rules(own), own.decoder_block)


def _saved(config: Config) -> SavedTeacher:
    size, dtype = (config.teacher_overrides[name] for name in ("vocab_size", "dtype"))
    return SavedTeacher(config.distill_vocab_size, size, saved_fields(config.teacher_logits_k, size, dtype))


def _joint(student: Rules, teacher: Rules, block: str) -> Rules:
    if different := [name for name, axes in teacher.items() if student.get(name, axes) != axes]:
        raise UserError(
            f"the teacher's decoder_block={block}: its sharding rule for {different[0]} differs from the student's"
        )
    return {**teacher, **student}


def _teacher_config(config: Config, devices: Sequence[jax.Device]) -> Config:
    if not config.teacher_overrides:
        raise UserError(
            "there is no teacher: give its folder with teacher_path or, to compile without weights, give its keys, as "
            "in teacher_overrides={model_name: NAME}"
        )
    try:
        return resolve(teacher_values(config), **hardware(devices))
    except UserError as error:
        raise UserError(f"the teacher: {error}") from error
