"""The train states of a run on disk: save, verify, restore, retention."""

from trainer.checkpoint.base import base_of, check_base, place_of, with_base, without_base
from trainer.checkpoint.compare import check_dtypes
from trainer.checkpoint.manager import CheckpointManager, SavedCheckpoints, inspect, newest, restore
from trainer.checkpoint.save import is_due, maybe_save_checkpoint
from trainer.checkpoint.sidecar import Base, Sidecar, saved_config

__all__ = [
    "Base",
    "CheckpointManager",
    "SavedCheckpoints",
    "Sidecar",
    "base_of",
    "check_base",
    "check_dtypes",
    "inspect",
    "is_due",
    "maybe_save_checkpoint",
    "newest",
    "place_of",
    "restore",
    "saved_config",
    "with_base",
    "without_base",
]
