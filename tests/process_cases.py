"""Starts real processes under jax.distributed on this machine, as a user would."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from compiler import xla_flags
from support import TINY, pinned

from trainer.observe.metrics import METRICS_FILE, TIMING_FIELDS, read_rows
from trainer.train import main

LAUNCHER = Path(__file__).parents[1] / "scripts" / "launch_local.py"
SETTINGS = TINY | {
    "enable_checkpointing": True,
    "run_name": "run",
    "steps": 5000,
    "learning_rate_schedule_steps": 60,
    "per_device_batch_size": 2,
    "checkpoint_period": 4,
    "eval_interval": 4,
    "eval_steps": 2,
    "dropout_rate": 0.1,
}


def words(**changes):
    return ["base.yml", *(f"{key}={value}" for key, value in (SETTINGS | pinned("nnx") | changes).items())]


@contextlib.contextmanager
def as_on_a_terminal():
    """Processes started within this context react to Ctrl-C, even if a script has started the tests in the
    background."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def launched(folder, processes, devices, *options, **changes):
    """Starts processes that train in `folder`, with options for the launcher. Yields the launcher and its output
    file."""
    options = ["-n", str(processes), "--devices", str(devices), *options]
    command = [sys.executable, LAUNCHER, *options, "--", *words(**changes)]
    environment = os.environ | {"XLA_FLAGS": xla_flags(devices)}
    with as_on_a_terminal(), (folder / "log.txt").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment)
    try:
        yield launcher, folder / "log.txt"
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(40)


def wait_for(text, launcher, log, after=0):
    until = time.monotonic() + 240
    while text not in log.read_text()[after:]:
        assert launcher.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


def process(launcher, index):
    """Returns the process id of one of the launcher's processes."""
    found = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return next(int(pid) for pid in found if f"process_id={index}\0" in Path(f"/proc/{pid}/cmdline").read_text())


def alone(folder, devices, **changes):
    """Returns the output of a single-process run with `devices` devices."""
    output, some = io.StringIO(), jax.devices()[:devices]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(jax, "devices", lambda: some)
        patch.chdir(folder)
        main(words(**changes))
    return output.getvalue()


def rows_of(folder):
    rows = read_rows(folder / "runs/run" / METRICS_FILE)
    return [{key: value for key, value in row.items() if key not in TIMING_FIELDS} for row in rows]
