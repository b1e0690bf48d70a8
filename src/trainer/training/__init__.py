"""From a configuration to a run: build, step, evaluate, loop."""

from trainer.training.build import Run, build
#from trainer.training.loop import fit

__all__ = ["Run", "build"]
