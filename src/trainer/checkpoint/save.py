"""Decides when to save a checkpoint."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from trainer.backends.base import Codec
from trainer.checkpoint.base import without_base
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.keys import Config
from trainer.ops.paths import Path
from trainer.state.stages import in_layers


def is_due(config: Config, updates: int, *, initial: bool = False) -> bool:
    """Returns whether a checkpoint of the state after `updates` updates is due.

    `initial`: whether this is the state with which the run begins, newly initialized or loaded.
    """
    if initial:
        return config.save_checkpoint_on_start
    return updates % config.checkpoint_period == 0 or (updates == config.steps and config.save_checkpoint_on_completion)


def maybe_save_checkpoint(
    manager: CheckpointManager | None,
    state: Any,
    updates: int | None = None,
    *,
    config: Config,
    codec: Codec,
    sidecar: Callable[[], Sidecar],
    initial: bool = False,
    force: bool = False,
    before: Callable[[], Mapping[str, float]] = dict,
    unsaved: Collection[Path] = (),
) -> bool:
    """Saves the native train state if a checkpoint is due. All saves of a run go through this function.

    Args:
      manager: saves the checkpoint. If None, nothing is saved.
      state: the native train state. Its arrays may be donated after the call.
      updates: the number of updates of `state`, if the caller counts them. If None, each call reads the state's step
        and so waits for the device. Before a save, `updates` is always compared with the state's step.
      sidecar: returns the metadata to save with the state.
      initial: see `is_due`.
      force: whether to save even if no checkpoint is due, because the run ends.
      before: called just before a save begins. It syncs the reports on earlier steps to disk, and returns the metrics
        for retention.
      unsaved: the paths of parameters to omit, together with the optimizer's state for them.

    Returns:
      Whether a save was started.

    Raises:
      ValueError: `updates` differs from the state's step; nothing is saved.
    """
    if manager is None:
        return False
    if updates is None:
        updates = _step_of(codec.unpack(state))
    if manager.latest == updates or not (force or is_due(config, updates, initial=initial)):
        return False
    tree = codec.unpack(state)
    if _step_of(tree) != updates:
        raise ValueError(f"a checkpoint of {updates} updates is due, but the state holds {_step_of(tree)}")
    metrics = before()
    manager.save(updates, in_layers(config, without_base(tree, unsaved)), sidecar(), metrics)
    return True


def _step_of(tree: Any) -> int:
    return int(jax.device_get(tree.step))
