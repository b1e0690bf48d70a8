"""The keys of checkpoints: the state from which a run starts, and the checkpoints that it saves and keeps."""

import re

from trainer.config.key_rows import Check, Inert, Place, Resume, Row, refused
from trainer.config.keys import Config

_KEPT = ("max_num_checkpoints_to_keep", "checkpoint_keep_period", "keep_best_checkpoints", "keep_best_metric")
_SAVED = (
    *("checkpoint_period", "save_checkpoint_on_start", "save_checkpoint_on_completion", "async_checkpointing"),
    *_KEPT,
)


def _checkpoints_to_keep(config: Config) -> str | None:
    number = config.max_num_checkpoints_to_keep
    return "must be at least 1, or none to keep all" if number is not None and number < 1 else None


def best_of_tasks(config: Config) -> bool:
    """Returns whether keep_best_metric is a task's score."""
    return "/" in config.keep_best_metric


def _best(config: Config) -> str | None:
    interval = config.eval_tasks_interval if best_of_tasks(config) else config.eval_interval
    if not config.keep_best_checkpoints or interval <= 0 or not interval % config.checkpoint_period:
        return None
    key = "eval_tasks_interval" if best_of_tasks(config) else "eval_interval"
    return f"only states that are both evaluated and saved can be kept: checkpoint_period must divide {key}"


def _best_metric(config: Config) -> str | None:
    if not re.fullmatch(r"(min|max):\S+", config.keep_best_metric):
        return "must be min: or max:, then a field of an evaluation, such as min:eval_loss or max:TASK/exact_match"
    if config.keep_best_checkpoints and best_of_tasks(config) and not config.eval_tasks:
        return "is a task's score, but eval_tasks is empty"
    return None


ROWS = (
    Row(("load_parameters_path", "load_full_state_path"), step=False, path=Place.BUCKET),
    Row(
        # `trainer.config.resume.resets` determines whether reset_optimizer applies to a resumed run.
        ("enable_checkpointing", *_SAVED, "reset_optimizer", "abort_on_nan_loss", "abort_on_inf_loss"),
        Resume.AROUND,
        step=False,
    ),
)
CHECKS: tuple[Check, ...] = (
    (("max_num_checkpoints_to_keep",), _checkpoints_to_keep),
    (("keep_best_checkpoints", "keep_best_metric", "checkpoint_period", "eval_interval", "eval_tasks_interval"), _best),
    (("keep_best_metric", "eval_tasks"), _best_metric),
    # enable_lora allows both keys: the state contains only adapters, and load_parameters_path locates the base model.
    refused(
        ("load_parameters_path", "load_full_state_path"),
        lambda c: c.load_parameters_path and c.load_full_state_path and not c.enable_lora,
        "give only one of them",
    ),
)
INERT = (
    Inert(_SAVED, lambda c: not c.enable_checkpointing, "enable_checkpointing=false"),
    Inert(
        ("reset_optimizer",),
        lambda c: not c.enable_checkpointing and not c.load_full_state_path,
        "no state is loaded: enable_checkpointing=false and load_full_state_path is empty",
    ),
    Inert(
        ("checkpoint_keep_period", "keep_best_checkpoints", "keep_best_metric"),
        lambda c: c.enable_checkpointing and c.max_num_checkpoints_to_keep is None,
        "max_num_checkpoints_to_keep=none keeps all",
    ),
    Inert(
        ("keep_best_checkpoints",),
        lambda c: c.keep_best_checkpoints > 0 and c.eval_interval <= 0 and not best_of_tasks(c),
        "eval_interval disables evaluation",
    ),
    Inert(("keep_best_metric",), lambda c: not c.keep_best_checkpoints, "keep_best_checkpoints=0"),
)
