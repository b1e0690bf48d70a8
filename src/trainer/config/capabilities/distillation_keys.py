"""Keys of distillation, and their checks."""

from collections.abc import Sequence

from trainer.config.capabilities.chat_keys import DISTILL
from trainer.config.capabilities.pipeline_keys import stages
from trainer.config.derived import DCN, ICI, samples_divergence
from trainer.config.key_rows import Check, Inert, Place, Resume, Row, only_if, refused
from trainer.config.keys import Config
from trainer.config.schema import schema
from trainer.config.shared_keys import SHARED

SAVE, SAVED = "save_teacher_logits", "teacher_logits_path"
_SCHEDULES = ("distill_alpha", "distill_temperature")


def _overrides(config: Config) -> str | None:
    for name in config.teacher_overrides:
        if name == "load_parameters_path":
            return f"{name} is a key of the student; the teacher's key is teacher_path"
        if name in SHARED:
            return f"{name} has the same value for student and teacher; set it outside of teacher_overrides"
        key = schema().keys.get(name)
        if name == "mtp_num_layers" or key is None or (key.section != "Model" and name != "model_name"):
            return f"{name} is not a key of the teacher's model (python -m trainer.train --help Model)"
    return None


def _end(key: str) -> Check:
    def problem(config: Config) -> str | None:
        if config[f"{key}_schedule"] == "constant" or config[f"{key}_end"] is not None:
            return None
        return f"set the value at the end, as in {key}_end={config[key]}"

    return (f"{key}_schedule", f"{key}_end"), problem


def _range_of_end(key: str) -> Check:
    def problem(config: Config) -> str | None:
        allowed = schema().keys[key]
        return None if config[f"{key}_end"] is None or allowed.accepts(config[f"{key}_end"]) else allowed.allowed

    return (f"{key}_end",), problem


def _constant(key: str) -> Inert:
    return Inert((f"{key}_end",), lambda c: c[f"{key}_schedule"] == "constant", f"{key}_schedule=constant")


def not_distilled(config: Config) -> list[str]:
    """Returns one message for each key that prevents trainer.distill from training."""
    lines = [] if config.use_distill else [f"use_distill=false: {DISTILL} is for distillation; leave it out"]
    if not config.teacher_path and (config[SAVE] or not config[SAVED]):
        lines.append("teacher_path is empty; give the teacher's folder, teacher_path=FOLDER")
    return lines


_KEYS: Sequence[str] = (
    *("teacher_path", "teacher_overrides", "teacher_memory_host_offload", "distill_loss", "distill_vocab_size"),
    *(SAVE, SAVED, "teacher_logits_k", "distill_rollouts", "distill_rollouts_share", "distill_jensen_shannon_weight"),
    *(f"{key}{part}" for key in _SCHEDULES for part in ("", "_end", "_schedule")),
)
ROWS = (
    Row(("teacher_path",), step=False, path=Place.BUCKET),
    Row(("teacher_memory_host_offload",), Resume.SAME_BITS),
    Row((SAVED,), step=False, path=Place.LOCAL),
    Row((SAVE,), Resume.AROUND, step=False, path=Place.LOCAL),
    Row(("teacher_logits_k",), Resume.AROUND),
)
_WITH_TEACHER: tuple[Check, ...] = (
    refused(
        ("use_dpo", "use_grpo"),
        lambda c: c.use_dpo or c.use_grpo,
        f"{DISTILL} trains on documents, or on conversations with use_sft=true; leave it out",
    ),
    refused(
        (ICI["stage"], DCN["stage"]),
        lambda c: stages(c) > 1 and not c[SAVED],
        "the teacher does not run in a pipeline; use fsdp and tensor instead of stages",
    ),
    refused(
        ("distill_alpha", "distill_alpha_schedule"),
        lambda c: not c.distill_alpha and (c.distill_alpha_schedule == "constant" or not c.distill_alpha_end),
        "nothing would be learned from the teacher; to train without a teacher, use trainer.train",
    ),
    refused(
        (SAVED, "teacher_path", SAVE),
        lambda c: c[SAVED] and (c.teacher_path or c[SAVE]),
        "a run uses either saved logits or a teacher; give only one of them",
    ),
    refused(
        (SAVE, "supervise"), lambda c: c[SAVE] and c.supervise, "only training can be supervised; set supervise=false"
    ),
    (("teacher_overrides",), _overrides),
    *map(_end, _SCHEDULES),
    refused(
        ("distill_loss", "distill_rollouts"),
        lambda c: samples_divergence(c) and not c.distill_rollouts,
        "this loss is estimated from tokens that the student samples; set distill_rollouts=true, or use reverse_kl",
    ),
)
_ON_ROLLOUTS: tuple[Check, ...] = (
    refused(
        (SAVE, SAVED),
        lambda c: c[SAVE] or c[SAVED],
        "logits are saved for rows of data, but the student's own texts change in each round; leave it out",
    ),
    refused(
        ("use_sft",),
        lambda c: c.use_sft,
        "rollouts begin with prompts; leave out use_sft, and set use_chat_template=true for a chat",
    ),
    refused(
        ("distill_alpha", "distill_alpha_schedule", "distill_rollouts_share"),
        lambda c: c.distill_rollouts_share == 1 and (c.distill_alpha, c.distill_alpha_schedule) != (1, "constant"),
        "the student's own texts have no labels; set distill_alpha=1 distill_alpha_schedule=constant",
    ),
    refused(
        ("distill_loss", "distill_rollouts_share"),
        lambda c: samples_divergence(c) and c.distill_rollouts_share < 1,
        "the student does not sample the tokens of the data; use reverse_kl, or set distill_rollouts_share=1",
    ),
    refused(
        ("distill_loss", "distill_temperature", "distill_temperature_schedule", "decode_sampling_temperature"),
        lambda c: (
            samples_divergence(c)
            and (c.distill_temperature, c.distill_temperature_schedule) != (c.decode_sampling_temperature, "constant")
        ),
        "tokens are sampled at decode_sampling_temperature; use the same, constant distill_temperature",
    ),
)
CHECKS: tuple[Check, ...] = (
    *map(_range_of_end, _SCHEDULES),
    *only_if(lambda c: c.use_distill, _WITH_TEACHER, shown=("use_distill",)),
    *only_if(lambda c: c.use_distill and c.distill_rollouts, _ON_ROLLOUTS, shown=("distill_rollouts",)),
)
INERT = (
    Inert(("distill_rollouts_share",), lambda c: not c.distill_rollouts, "distill_rollouts=false"),
    Inert(_KEYS, lambda c: not c.use_distill, "use_distill=false"),
    Inert(("teacher_overrides", "teacher_memory_host_offload"), lambda c: c[SAVED], f"{SAVED} replaces the teacher"),
    Inert(("teacher_logits_k",), lambda c: not c[SAVE], f"{SAVE} is empty"),
    Inert(
        ("distill_jensen_shannon_weight",),
        lambda c: c.distill_loss != "jensen_shannon",
        "only distill_loss=jensen_shannon has a weight",
    ),
    *map(_constant, _SCHEDULES),
)
