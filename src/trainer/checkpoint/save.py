"""When to save."""

from collections.abc import Callable, Mapping
from typing import Any

from trainer.backends import StateCodec
from trainer.checkpoint.beside import Beside
from trainer.checkpoint.manager import CheckpointManager


def is_due(config: Any, updates: int, *, initial: bool = False) -> bool:
    """Whether the configuration asks for a checkpoint of the state after `updates` updates.

    `initial`: it is the state that the run begins with, be it of another run's making.
    """
    if initial:
        return config.save_checkpoint_on_start
    return updates % config.checkpoint_period == 0 or (updates == config.steps and config.save_checkpoint_on_completion)


def maybe_save_checkpoint(
    manager: CheckpointManager | None,
    state: Any,
    updates: int,
    *,
    config: Any,
    codec: StateCodec,
    beside: Callable[[], Beside],
    initial: bool = False,
    force: bool = False,
    before: Callable[[], Mapping[str, float]] = dict,
) -> bool:
    """Saves the native train state after `updates` updates if it is due; the only place that decides.

    Args:
      manager: None saves nothing.
      state: native; its arrays may be donated when this returns.
      beside: gives what lies beside the state.
      initial: see `is_due`.
      force: save although no checkpoint is due, because the run ends here.
      before: called when it is decided, before anything is written: puts on the disk what the checkpoint covers, and
        gives the metrics by which retention chooses.

    Returns:
      whether a save was begun.
    """
    if manager is None or manager.latest == updates or not (force or is_due(config, updates, initial=initial)):
        return False
    metrics = before()
    manager.save(updates, codec.unpack(state), beside(), metrics)
    return True
