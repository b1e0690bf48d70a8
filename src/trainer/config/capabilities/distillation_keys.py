"""Keys of distillation, and their checks."""

from collections.abc import Sequence

from trainer.config.capabilities.chat_keys import DISTILL
from trainer.config.capabilities.context_keys import KEYS as CONTEXT_KEYS
from trainer.config.capabilities.pipeline_keys import stages
from trainer.config.capabilities.rl_keys import SAMPLED
from trainer.config.derived import DCN, ICI
from trainer.config.flags import FLAGS
from trainer.config.key_rows import Check, Inert, Place, Resume, Row, only_if, refused
from trainer.config.keys import Config

# The keys for which the teacher has the student's values: they share the mesh and the rows.
SHARED = (
    *FLAGS,
    *ICI.values(),
    *DCN.values(),
    *CONTEXT_KEYS,
    *("allow_split_physical_axes", "logical_axis_rules", "sharding_tolerance", "hardware", "max_target_length"),
    *("packing", "max_segments_per_seq", "per_device_batch_size", "gradient_accumulation_steps", "num_vocab_tiling"),
    *("eval_interval", "eval_per_device_batch_size", "batch_invariant"),
)
_ELSEWHERE = {"load_parameters_path": "teacher_path"}
_SCHEDULES = ("distill_alpha", "distill_temperature")


def _overrides(config: Config) -> str | None:
    for name in config.teacher_overrides:
        if name in _ELSEWHERE:
            return f"{name} is the student's; the teacher's is {_ELSEWHERE[name]}"
        if name in SHARED:
            return f"{name} has the same value for student and teacher; set it outside"
    return None


def _end(key: str) -> Check:
    within = {
        "distill_alpha": (lambda x: 0 <= x <= 1, "from 0 to 1"),
        "distill_temperature": (lambda x: x > 0, "above 0"),
    }
    allowed, words = within[key]

    def problem(config: Config) -> str | None:
        end, shape = config[f"{key}_end"], config[f"{key}_schedule"]
        if shape != "constant" and end is None:
            return f"name the value at the end, as in {key}_end={config[key]}"
        return None if end is None or allowed(end) else f"{key}_end must be {words}"

    return (f"{key}_schedule", f"{key}_end"), problem


def _constant(key: str) -> Inert:
    return Inert((f"{key}_end",), lambda c: c[f"{key}_schedule"] == "constant", f"{key}_schedule=constant")


def not_distilled(config: Config) -> list[str]:
    """Returns one message for each key that prevents trainer.distill from training."""
    lines = [] if config.use_distill else [f"use_distill=false: {DISTILL} is for distillation; leave it out"]
    if not config.teacher_path:
        lines.append("teacher_path is empty; give the teacher's folder, teacher_path=FOLDER")
    return lines


_KEYS: Sequence[str] = (
    *("teacher_path", "teacher_overrides", "teacher_memory_host_offload", "distill_loss", "distill_vocab_size"),
    *("distill_rollouts", "distill_rollouts_share", "distill_jensen_shannon_weight"),
    *(f"{key}{part}" for key in _SCHEDULES for part in ("", "_end", "_schedule")),
)
ROWS = (
    Row(("teacher_path",), path=Place.ANY),
    Row(("teacher_memory_host_offload",), Resume.SAME_BITS),
)
_WITH_TEACHER: tuple[Check, ...] = (
    refused(
        ("use_dpo", "use_grpo"),
        lambda c: c.use_dpo or c.use_grpo,
        f"{DISTILL} trains on documents, or on conversations with use_sft=true; leave it out",
    ),
    refused(
        (ICI["stage"], DCN["stage"]),
        lambda c: stages(c) > 1,
        "the teacher does not run in a pipeline; use fsdp and tensor instead of stages",
    ),
    refused(
        ("distill_alpha", "distill_alpha_schedule"),
        lambda c: not c.distill_alpha and c.distill_alpha_schedule == "constant",
        "nothing would be learned from the teacher; trainer.train trains without one",
    ),
    (("teacher_overrides",), _overrides),
    *map(_end, _SCHEDULES),
    refused(
        ("distill_loss", "distill_rollouts"),
        lambda c: c.distill_loss == SAMPLED and not c.distill_rollouts,
        "it is estimated from tokens that the student samples; set distill_rollouts=true, or take reverse_kl",
    ),
)
_ON_ROLLOUTS: tuple[Check, ...] = (
    refused(
        ("use_sft",),
        lambda c: c.use_sft,
        "rollouts begin with prompts; leave it out, and set use_chat_template=true for a chat",
    ),
    refused(
        ("distill_alpha", "distill_alpha_schedule", "distill_rollouts_share"),
        lambda c: c.distill_rollouts_share == 1 and (c.distill_alpha, c.distill_alpha_schedule) != (1, "constant"),
        "the student's own texts have no labels; set distill_alpha=1 distill_alpha_schedule=constant",
    ),
    refused(
        ("distill_loss", "distill_rollouts_share"),
        lambda c: c.distill_loss == SAMPLED and c.distill_rollouts_share < 1,
        "the student does not sample the tokens of the data; take reverse_kl, or set distill_rollouts_share=1",
    ),
    refused(
        ("distill_loss", "distill_temperature", "distill_temperature_schedule", "decode_sampling_temperature"),
        lambda c: (
            c.distill_loss == SAMPLED
            and (c.distill_temperature, c.distill_temperature_schedule) != (c.decode_sampling_temperature, "constant")
        ),
        "tokens are sampled at decode_sampling_temperature; set distill_temperature, constant, to the same",
    ),
)
CHECKS: tuple[Check, ...] = (
    *only_if(lambda c: c.use_distill, _WITH_TEACHER, shown=("use_distill",)),
    *only_if(lambda c: c.use_distill and c.distill_rollouts, _ON_ROLLOUTS, shown=("distill_rollouts",)),
)
INERT = (
    Inert(("distill_rollouts_share",), lambda c: not c.distill_rollouts, "distill_rollouts=false"),
    Inert(_KEYS, lambda c: not c.use_distill, "use_distill=false"),
    Inert(
        ("distill_jensen_shannon_weight",),
        lambda c: c.distill_loss != "jensen_shannon",
        "only distill_loss=jensen_shannon has a weight",
    ),
    *map(_constant, _SCHEDULES),
)
