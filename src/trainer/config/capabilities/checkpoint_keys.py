"""The keys of checkpoints: where a run starts, and what it keeps."""

from trainer.config.key_rows import Check, Inert, Place, Resume, Row
from trainer.config.keys import Config

_KEPT = ("max_num_checkpoints_to_keep", "checkpoint_keep_period", "keep_best_checkpoints")
_SAVED = (
    "checkpoint_period",
    "save_checkpoint_on_start",
    "save_checkpoint_on_completion",
    "async_checkpointing",
    *_KEPT,
)


def _checkpoints_to_keep(config: Config) -> str | None:
    number = config.max_num_checkpoints_to_keep
    return "must be at least 1, or none to keep all" if number is not None and number < 1 else None


def _best(config: Config) -> str | None:
    if (
        not config.keep_best_checkpoints
        or config.eval_interval <= 0
        or not config.eval_interval % config.checkpoint_period
    ):
        return None
    return "only states that are both evaluated and saved can be kept: checkpoint_period must divide eval_interval"


def _sources(config: Config) -> str | None:
    if config.enable_lora:  # the state has the adapters, and load_parameters_path the base, which may have moved
        return None
    return "give only one of them" if config.load_parameters_path and config.load_full_state_path else None


ROWS = (
    Row(("load_parameters_path", "load_full_state_path"), step=False, path=Place.BUCKET),
    Row(
        # For reset_optimizer see `resume.resets`.
        ("enable_checkpointing", *_SAVED, "reset_optimizer", "abort_on_nan_loss", "abort_on_inf_loss"),
        Resume.AROUND,
        step=False,
    ),
)
CHECKS: tuple[Check, ...] = (
    (("max_num_checkpoints_to_keep",), _checkpoints_to_keep),
    (("keep_best_checkpoints", "checkpoint_period", "eval_interval"), _best),
    (("load_parameters_path", "load_full_state_path"), _sources),
)
INERT = (
    Inert(_SAVED, lambda c: not c.enable_checkpointing, "enable_checkpointing=false"),
    Inert(
        ("reset_optimizer",),
        lambda c: not c.enable_checkpointing and not c.load_full_state_path,
        "no state is loaded: enable_checkpointing=false and load_full_state_path is empty",
    ),
    Inert(
        ("checkpoint_keep_period", "keep_best_checkpoints"),
        lambda c: c.enable_checkpointing and c.max_num_checkpoints_to_keep is None,
        "max_num_checkpoints_to_keep=none keeps all",
    ),
    Inert(
        ("keep_best_checkpoints",),
        lambda c: c.keep_best_checkpoints > 0 and c.eval_interval <= 0,
        "eval_interval disables evaluation",
    ),
)
