"""From a configuration to a run: build, step, evaluate, loop."""

from trainer.training.build import Run, build
from trainer.training.loop import Reports, fit

__all__ = ["Reports", "Run", "build", "fit"]
