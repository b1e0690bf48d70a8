"""Checks which keys differ between a checkpoint and the command that resumes from it."""

from collections.abc import Mapping
from typing import Any

from trainer.config.capabilities.all_keys import keys_of
from trainer.config.capabilities.context_keys import parts
from trainer.config.capabilities.decoding_keys import DRAWN
from trainer.config.derived import global_batch_rows, has_dropout, has_reference, has_rollouts, islands
from trainer.config.dump import to_flow
from trainer.config.errors import UserError
from trainer.config.key_rows import Resume
from trainer.config.keys import Config
from trainer.config.prepared import DETERMINING
from trainer.config.resolve import frozen
from trainer.config.schema import schema

LAYOUT = keys_of(Resume.LAYOUT, Resume.SAME_BITS)
BATCH = keys_of(Resume.BATCH)
TIMETABLE = keys_of(Resume.TIMETABLE)
UPDATE = keys_of(Resume.UPDATE, Resume.TIMETABLE)
MAY_CHANGE = frozenset((*LAYOUT, *BATCH, *keys_of(Resume.LENGTH, Resume.AROUND)))
_RESET = "its parameters and a fresh optimizer: reset_optimizer=true"


def check_resume(saved: Mapping[str, Any], config: Config, schedule_given: bool, where: str) -> list[str]:
    """Returns warnings about resuming under `config` from a checkpoint with the configuration `saved`.

    Args:
      saved: the keys of a config.yml. A missing key was added to base.yml later; its default is the old behaviour.
      config: the resolved configuration of the command.
      schedule_given: whether the command gives `learning_rate_schedule_steps`.
      where: the checkpoint, for the message.

    Raises:
      UserError: a key that must not change has changed; the message has the old and new values.
    """
    before = _with_defaults(saved)
    differing = [name for name in schema().keys if before[name] != frozen(config[name])]
    allowed = MAY_CHANGE.union(UPDATE) if config.reset_optimizer else MAY_CHANGE
    if config.enable_lora or has_reference(config):
        allowed = allowed.union(["load_parameters_path"])  # loading verifies the weights at this path
    if config.use_distill:
        # The teacher is verified when it is loaded. Its tokenizer and saved logits are verified with the position in
        # the data.
        allowed = allowed.union(["teacher_path", "tokenizer_path", "teacher_logits_path"])
    if _rows_split(before) != _rows_split(config):
        allowed = allowed.union(["attention"])  # splitting a row's tokens differently may need another kernel
    if not has_dropout(before) and not has_dropout(config):
        allowed = allowed.union(["enable_dropout"])
    if config.prepared_path or before.prepared_path:
        allowed = allowed.union(DETERMINING, ["tokenizer_path"])  # the saved data position verifies the rows
    if has_rollouts(config):
        allowed = allowed.difference(DRAWN)
    wrong = [_change(before, config, name) for name in differing if name not in allowed]
    if global_batch_rows(before) != global_batch_rows(config):
        changes = ", ".join(_change(before, config, name) for name in BATCH if name in differing)
        rows = f"{global_batch_rows(before)} -> {global_batch_rows(config)} rows"
        wrong.append(f"the global batch must not change, {rows}: {changes or 'another number of devices'}")
    if before.enable_diloco and config.enable_diloco and islands(before) != islands(config):
        wrong.append(_other_islands(before, config))
    warnings = []
    if "learning_rate_schedule_steps" in differing:
        change = _change(before, config, "learning_rate_schedule_steps")
        if config.reset_optimizer:
            warnings.append(change)
        elif schedule_given or before.learning_rate_schedule_steps != before.steps:
            wrong.append(change)
        else:
            warnings.append(f"the learning rate schedule follows steps: {change}")
    if wrong:
        lines = "\n  ".join(wrong)
        resettable = not config.reset_optimizer and not set(differing).isdisjoint(UPDATE)
        raise UserError(
            f"{where} was saved with another configuration (old -> new):\n  {lines}\n"
            "use the old values, or choose another run_name for a new run"
            + (f", or continue with {_RESET}" if resettable else "")
        )
    return warnings


def another_update(saved: Mapping[str, Any], config: Config) -> str:
    """Returns a line with the keys of `UPDATE` whose values differ from those in `saved`, the configuration of the run
    that produced the initial state; "" if none differs."""
    before = _with_defaults(saved)
    changes = ", ".join(_change(before, config, name) for name in UPDATE if before[name] != frozen(config[name]))
    return changes and f"its updates were made with other settings (old -> new): {changes}"


def another_program(saved: Mapping[str, Any], config: Config) -> str:
    """Returns a warning if resuming from a checkpoint with the configuration `saved` runs a different program for the
    same math, which may round differently; "" if the program is the same."""
    before = _with_defaults(saved)
    names = (*keys_of(Resume.LAYOUT), *BATCH, "attention")
    changed = [name for name in names if before[name] != frozen(config[name])]
    changes = ", ".join(_change(before, config, name) for name in changed)
    return changes and f"losses may differ in the last bits, because these keys change the compiled program: {changes}"


def check_islands(saved: Mapping[str, Any], config: Config, where: str) -> None:
    """Checks that the number of DiLoCo islands equals the checkpoint's.

    If islands take over a synchronized fragment only some steps later, the synchronization schedule must also be the
    same: with another schedule, the islands would never take over a fragment that was synchronized just before the
    checkpoint.

    Args: see `check_resume`.

    Raises:
      UserError: names both numbers, or the changed keys.
    """
    before = _with_defaults(saved)
    if not (before.enable_diloco and config.enable_diloco):
        return
    if islands(before) != islands(config):
        raise UserError(f"{where}: {_other_islands(before, config)}")
    late = before.enable_streaming_diloco and before.num_communication_overlapping_steps
    changes = ", ".join(_change(before, config, name) for name in TIMETABLE if before[name] != config[name])
    if late and changes:
        raise UserError(
            f"{where}: its islands may not have taken over the last synchronized fragment yet, and never would with "
            f"another schedule ({changes}): use the old values, or continue with {_RESET}"
        )


def _rows_split(config: Config) -> tuple[int, str]:
    count = parts(config)
    return count, config.context_parallel_strategy if count > 1 else ""


def islands_of(saved: Mapping[str, Any]) -> int:
    """Returns the number of DiLoCo islands in a checkpoint with the configuration `saved`; 0 without DiLoCo."""
    before = _with_defaults(saved)
    return islands(before) if before.enable_diloco else 0


def _other_islands(before: Any, config: Config) -> str:
    return (
        f"the number of DiLoCo's islands must not change, {islands(before)} -> {islands(config)}: each has its own "
        "optimizer state; load_parameters_path begins a new run from the outer parameters"
    )


def check_optimizer(saved: Mapping[str, Any], config: Config, where: str) -> None:
    """Refuses optimizer state of another `opt_type`, even if its arrays have the same names and shapes.

    Args: see `check_resume`.

    Raises:
      UserError: names both types.
    """
    theirs = _with_defaults(saved).opt_type
    if theirs != config.opt_type:
        raise UserError(
            f"{where} holds the optimizer state of {theirs}, and this command has opt_type={config.opt_type}: give "
            f"opt_type={theirs}, or continue with {_RESET}"
        )


def resets(saved: Mapping[str, Any], config: Config) -> bool:
    """Returns whether `reset_optimizer` applies to a run's own checkpoint, which has the configuration `saved`.

    It does not apply if the checkpoint was already saved with `reset_optimizer` and the same values of the keys in
    `UPDATE`, so that repeating the command resumes the run instead of resetting the optimizer again.
    """
    before = _with_defaults(saved)
    again = before.reset_optimizer and all(before[name] == frozen(config[name]) for name in UPDATE)
    return config.reset_optimizer and not again


def _with_defaults(saved: Mapping[str, Any]) -> Any:
    return Config({name: frozen(saved.get(name, key.default)) for name, key in schema().keys.items()})


def _change(before: Any, config: Config, name: str) -> str:
    changed = f"{name}: {to_flow(before[name])} -> {to_flow(config[name])}"
    return f"{changed} (the checkpoint has the optimizer state of {before[name]})" if name == "opt_type" else changed
