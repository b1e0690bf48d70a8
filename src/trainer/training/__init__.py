"""From a configuration to a run: build, step, evaluate, loop."""

from trainer.training.batches import BatchSource
from trainer.training.build import build
from trainer.training.diloco import build_diloco_train_step
from trainer.training.evaluate import check_held_out
from trainer.training.loop import Reports, fit
from trainer.training.run import Run
from trainer.training.start import Start, start

__all__ = [
    "BatchSource",
    "Reports",
    "Run",
    "Start",
    "build",
    "build_diloco_train_step",
    "check_held_out",
    "fit",
    "start",
]
