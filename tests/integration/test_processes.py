"""Real processes under jax.distributed on this machine, started as a user starts them here."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from support import TINY, pinned

from trainer.checkpoint import inspect, newest
from trainer.observe.metrics import METRICS_FILE, TIMING_FIELDS, read_rows
from trainer.train import main

LAUNCHER = Path(__file__).parents[2] / "scripts" / "launch_local.py"
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
def launched(folder, processes, devices):
    """Processes that train in `folder`, and the file of what they say."""
    command = [sys.executable, LAUNCHER, "-n", str(processes), "--devices", str(devices), "--", *words()]
    with (folder / "log.txt").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        yield launcher, folder / "log.txt"
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(40)


def wait_for(text, launcher, log):
    until = time.monotonic() + 240
    while text not in log.read_text():
        assert launcher.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


def process(launcher, index):
    """The process id of one of the launcher's processes."""
    found = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return next(int(pid) for pid in found if f"process_id={index}\0" in Path(f"/proc/{pid}/cmdline").read_text())


def alone(folder, devices, **changes):
    """What one process with `devices` devices says."""
    output, some = io.StringIO(), jax.devices()[:devices]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(jax, "devices", lambda: some)
        patch.chdir(folder)
        main(words(**changes))
    return output.getvalue()


def rows_of(folder):
    rows = read_rows(folder / "runs/run" / METRICS_FILE)
    return [{key: value for key, value in row.items() if key not in TIMING_FIELDS} for row in rows]


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
def test_four_processes_then_two_then_one(tmp_path):
    """Each goes on from the checkpoint of the one before, and all of it is what one process learns."""
    with launched(tmp_path, 4, 1) as (launcher, log):
        wait_for("completed step: 5,", launcher, log)
        os.kill(process(launcher, 3), signal.SIGTERM)  # a request to one of them is one to all
        assert launcher.wait(60) == 143, log.read_text()
        said = log.read_text()
    assert "4 x cpu, 4 processes" in said
    assert said.count("compiling the training step") == 1, "the first process speaks for all"
    assert "SIGTERM: saved, the same command goes on from here (runs/run)" in said
    assert "launch_local" not in said
    first = newest(tmp_path / "runs/run")
    done = int(first.name)
    assert done > 5
    positions = {path.name: path.read_text() for path in (first / "run").glob("data*.json")}
    assert len(positions) == 4
    assert len(set(positions.values())) == 1, "prepared data stand at one place"
    assert inspect(first).position["row"] == 8 * done
    files = {path.relative_to(first).as_posix(): path for path in first.rglob("*") if path.is_file()}
    sums = json.loads(files["sums.json"].read_text())
    assert files.keys() - sums <= {"sums.json", "commit_success.txt", "_CHECKPOINT_METADATA"}
    damaged = next(name for name in sums if "ocdbt.process_3/d/" in name)
    content = files[damaged].read_bytes()

    files[damaged].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with launched(tmp_path, 2, 2) as (launcher, log):
        assert launcher.wait(60) == 2, log.read_text()
        # Process 1, whose paths are absolute, names it if the file is in its share.
        expected = f"runs/run/checkpoints/{done} is damaged: {damaged} is not what was written"
        assert expected in log.read_text(), log.read_text()
    files[damaged].write_bytes(content)

    with launched(tmp_path, 2, 2) as (launcher, log):
        wait_for(f"completed step: {done + 5},", launcher, log)
        until = time.monotonic() + 60
        while int(newest(tmp_path / "runs/run").name) == done:  # a save goes on beside the steps
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        started = time.monotonic()
        os.kill(process(launcher, 1), signal.SIGKILL)
        assert launcher.wait(60) == 137, log.read_text()
        assert time.monotonic() - started < 30
        said = log.read_text()
    assert f"checkpoints/{done}: {done:,} of 5,000 updates are done" in said
    assert "launch_local: process 1 of 2 was ended by SIGKILL; the others end too" in said
    last = int(newest(tmp_path / "runs/run").name)
    assert last > done

    said = alone(tmp_path, 4, steps=last + 2)
    (tmp_path / "straight").mkdir()
    alone(tmp_path / "straight", 4, steps=last + 2, checkpoint_period=1000)
    assert f"checkpoints/{last}: {last} of {last + 2} updates are done" in said
    found, expected = rows_of(tmp_path), rows_of(tmp_path / "straight")
    assert [(row["step"], row.keys()) for row in found] == [(row["step"], row.keys()) for row in expected]
    for name in ("loss", "eval_loss", "grad_norm"):
        # Sums over processes are taken in another order than within one.
        left, right = ([row[name] for row in rows if name in row] for rows in (found, expected))
        np.testing.assert_allclose(left, right, rtol=1e-5)
    assert [row["tokens"] for row in found if "loss" in row] == [row["tokens"] for row in expected if "loss" in row]
