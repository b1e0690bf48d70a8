"""Train states and parameters on disk."""

from trainer.checkpoint.beside import Beside, saved_config
from trainer.checkpoint.manager import CheckpointManager, inspect, newest, restore
from trainer.checkpoint.save import is_due, maybe_save_checkpoint

__all__ = [
    "Beside",
    "CheckpointManager",
    "inspect",
    "is_due",
    "maybe_save_checkpoint",
    "newest",
    "restore",
    "saved_config",
]
