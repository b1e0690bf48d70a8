"""Turns a configuration into a run: build, step, evaluate, loop."""

from trainer.training.about import about_run
from trainer.training.batches import BatchSource, placed
from trainer.training.build import build
from trainer.training.compiled import StepsByRows, compiled_step, loaded_step, needs_of
from trainer.training.diloco import build_diloco_train_step
from trainer.training.evaluate import check_held_out
from trainer.training.loop import Reports, fit
from trainer.training.passes import passes_text, steps_of
from trainer.training.reports import keep_sample, metrics_files, open_reports, run_work, start_entry
from trainer.training.run import Run
from trainer.training.start import Start, start

__all__ = [
    "BatchSource",
    "Reports",
    "Run",
    "Start",
    "StepsByRows",
    "about_run",
    "build",
    "build_diloco_train_step",
    "check_held_out",
    "compiled_step",
    "fit",
    "keep_sample",
    "loaded_step",
    "metrics_files",
    "needs_of",
    "open_reports",
    "passes_text",
    "placed",
    "run_work",
    "start",
    "start_entry",
    "steps_of",
]
