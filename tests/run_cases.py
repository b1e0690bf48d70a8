"""Runs the command in a folder, in this process, and compares the files of runs."""

import contextlib
import io
import shutil
import sys
from pathlib import Path

import jax
import pytest
from support import TINY, pinned

from trainer.checkpoint.manager import newest
from trainer.observe.goodput import GOODPUT_FILE
from trainer.observe.metrics import METRICS_FILE, TIMING_FIELDS, read_rows
from trainer.train import main

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import fault_rounds

arrays_of = fault_rounds.arrays_of

SETTINGS = TINY | {
    "enable_checkpointing": True,
    "steps": 60,
    "learning_rate_schedule_steps": 60,
    "per_device_batch_size": 8,
    "checkpoint_period": 10,
    "max_num_checkpoints_to_keep": "none",
    "eval_interval": 10,
    "eval_steps": 2,
    "dropout_rate": 0.1,
}
RUN = Path("runs/run-0001")


def train(folder, *words, devices=1, combination="nnx", **overrides):
    """Returns the exit code and the output of a run of the command in `folder` on some of the devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return command(SETTINGS | pinned(combination) | overrides, *words, devices=devices)


def command(settings, *words, devices=1, program=main):
    """Like `train`, in the current folder, with the command line `program`, `settings` and `words`."""
    found = jax.devices()[:devices]
    output, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        patch.setattr(jax, "devices", lambda: found)
        try:
            program(["base.yml", *(f"{key}={value}" for key, value in settings.items()), *words])
        except SystemExit as exit_:
            code = exit_.code
    return code, output.getvalue()


def killed_at(updates, finished, folder):
    """Copies the finished run to `folder`, in the state after a SIGKILL right after one of its checkpoints, and returns
    the copy."""
    run = folder / RUN
    shutil.copytree(finished, run)
    (run / "finished").unlink()
    *events, _ = (run / GOODPUT_FILE).read_text().splitlines(keepends=True)  # without the end event
    (run / GOODPUT_FILE).write_text("".join(events))
    for path in (run / "checkpoints").iterdir():
        if int(path.name) > updates:
            shutil.rmtree(path)
    return run


def rows_of(run):
    return [{k: v for k, v in row.items() if k not in TIMING_FIELDS} for row in read_rows(run / METRICS_FILE)]


def assert_equal(run, other, updates=60):
    """Compares the metrics of two runs, and their last checkpoints bit by bit."""
    assert newest(run).name == str(updates)
    assert rows_of(run) == [row for row in rows_of(other) if row["step"] < updates]
    left, right = (arrays_of(x / f"checkpoints/{updates}") for x in (run, other))
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.tobytes() == right[name].tobytes(), name
