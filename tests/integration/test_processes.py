"""Runs of several processes, which end in several ways and are resumed."""

import json
import os
import re
import signal
import sys
import time

import numpy as np
import pytest
from again import sharing_programs
from process_cases import alone, launched, process, rows_of, wait_for

from trainer.checkpoint.manager import inspect, newest
from trainer.observe.goodput import BETWEEN, read_goodput

SMALL = {"enable_tensorboard": False}


@pytest.mark.rest(
    covered_by="two processes at first; unit/checkpoint/test_sums.py; unit/runtime/test_launch_local.py", cases=("4",)
)
@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("processes", [4, 2])
def test_some_processes_then_fewer(tmp_path, processes):
    """Each run resumes from the previous run's checkpoint, and together they equal a run of one process.

    With four processes: a damaged file is reported, then two processes resume, one of them is killed, and the launcher
    restarts both. With two: a single process with a single device resumes directly.
    """
    with launched(tmp_path, processes, 4 // processes, **SMALL) as (launcher, log):
        wait_for("completed step: 5,", launcher, log)
        # A request to one process is a request to all. A launcher forwards Ctrl-C to all.
        pids = [process(launcher, index) for index in range(processes - 1 if processes == 4 else 0, processes)]
        for pid in pids:
            os.kill(pid, signal.SIGTERM if processes == 4 else signal.SIGINT)
        assert launcher.wait(60) == (143 if processes == 4 else 130), log.read_text()
        said = log.read_text()
    assert f"4 x cpu, {processes} processes" in said
    assert said.count("compiling the training step") == 1, "the first process speaks for all"
    assert (
        f"{'SIGTERM' if processes == 4 else 'Ctrl-C'}: saved; the same command continues from here (runs/run)" in said
    )
    assert "launch_local" not in said
    first = newest(tmp_path / "runs/run")
    done = int(first.name)
    assert done > 5
    positions = {path.name: path.read_text() for path in (first / "run").glob("data*.json")}
    assert len(positions) == processes
    assert len(set(positions.values())) == 1, "prepared data stand at one place"
    assert inspect(first).position["row"] == 8 * done
    files = {path.relative_to(first).as_posix(): path for path in first.rglob("*") if path.is_file()}
    sums = json.loads(files["sums.json"].read_text())
    assert files.keys() - sums <= {"sums.json", "commit_success.txt", "_CHECKPOINT_METADATA"}
    damaged = next(name for name in sums if f"ocdbt.process_{processes - 1}/d/" in name)

    if processes == 4:
        content = files[damaged].read_bytes()
        files[damaged].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with launched(tmp_path, 2, 2, **SMALL) as (launcher, log):
            assert launcher.wait(60) == 2, log.read_text()
            # Process 1, whose paths are absolute, reports the file if it is in its share.
            expected = f"runs/run/checkpoints/{done} is damaged: {damaged} has changed since it was written"
            assert expected in log.read_text(), log.read_text()
        files[damaged].write_bytes(content)

        with launched(tmp_path, 2, 2, "--restarts", "1", **SMALL) as (launcher, log):
            wait_for(f"completed step: {done + 5},", launcher, log)
            until = time.monotonic() + 60
            while int(newest(tmp_path / "runs/run").name) == done:  # a save continues while steps run
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.05)
            between, started = read_goodput(tmp_path / "runs/run").seconds()[BETWEEN], time.monotonic()
            os.kill(process(launcher, 1), signal.SIGKILL)
            wait_for("launch_local: restart 1 of 1 in 1 s", launcher, log)
            assert time.monotonic() - started < 30
            before = log.read_text().index("launch_local: restart 1")
            wait_for("completed step: ", launcher, log, before)
            launcher.terminate()
            assert launcher.wait(60) == 143, log.read_text()
            said = log.read_text()
        assert f"checkpoints/{done}: {done:,} of 5,000 updates are done" in said[:before]
        assert "launch_local: process 1 of 2 was ended by SIGKILL after " in said[:before]
        (resumed,) = re.findall(r"checkpoints/(\d+): .* updates are done", said[before:])
        assert int(resumed) > done
        passed = read_goodput(tmp_path / "runs/run").seconds()[BETWEEN] - between
        assert passed > 1, "the pause of the launcher counts"

    last = int(newest(tmp_path / "runs/run").name)
    (tmp_path / "straight").mkdir()
    with sharing_programs():
        said = alone(tmp_path, 1, **(ends := SMALL | {"steps": last + 2, "per_device_batch_size": 8}))
        alone(tmp_path / "straight", 1, **ends, checkpoint_period=1000)
    assert f"checkpoints/{last}: {last} of {last + 2} updates are done" in said
    found, expected = rows_of(tmp_path), rows_of(tmp_path / "straight")
    assert [(row["step"], row.keys()) for row in found] == [(row["step"], row.keys()) for row in expected]
    for name in ("loss", "eval_loss", "grad_norm"):
        # Summing over processes has a different order than within one process.
        left, right = ([row[name] for row in rows if name in row] for rows in (found, expected))
        np.testing.assert_allclose(left, right, rtol=1e-5)
    assert [row["tokens"] for row in found if "loss" in row] == [row["tokens"] for row in expected if "loss" in row]
