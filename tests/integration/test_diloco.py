"""Whole DiLoCo runs, started as a user starts them."""

import json
import os
import signal
import sys

import numpy as np
import pytest
from process_cases import alone, launched, process, rows_of, wait_for
from run_cases import RUN, arrays_of, assert_equal, killed_at, train
from support import ALL_COMBINATIONS

from trainer.checkpoint.manager import newest

ISLANDS = {
    "enable_diloco": True,
    "ici_diloco_parallelism": 2,
    "ici_fsdp_parallelism": 2,
    "per_device_batch_size": 2,
    "diloco_sync_period": 4,
    "steps": 6,
    "learning_rate_schedule_steps": 6,
    "checkpoint_period": 3,
    "eval_interval": 1,
    "eval_steps": 1,
    "dropout_rate": 0.0,
}


def test_a_run_of_islands_and_its_end_under_another_combination(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    straight.mkdir()
    code, output = train(straight, devices=4, **ISLANDS)
    assert code == 0, output
    rows = [json.loads(line) for line in (straight / RUN / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    assert losses[0] == losses[1] == losses[2] != losses[3] == losses[4] != losses[5], "of the outer parameters"
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps if "outer_grad_norm" in row] == [3, 5]
    assert all(len(set(row["island_losses"])) == 2 for row in steps)

    killed_at(3, straight / RUN, broken)
    code, output = train(broken, "run_name=run-0001", devices=4, combination=ALL_COMBINATIONS[-1], **ISLANDS)
    assert code == 0, output
    assert "checkpoints/3: 3 of 6 updates are done" in output
    assert_equal(broken / RUN, straight / RUN, updates=6)

    last = arrays_of(newest(straight / RUN))
    names = [name for name in last if name.startswith("params/")]
    for name in names:
        for island in last[f"inner_state/{name}"]:
            assert island.tobytes() == last[name].tobytes(), "a run ends with a synchronization"


STREAMING = {
    "enable_streaming_diloco": True,
    "num_diloco_fragments": 2,
    "num_communication_overlapping_steps": 1,
    "communication_overlapping_alpha": 0.5,
}


@pytest.mark.rest(covered_by="islands in one process; integration/test_processes.py")
@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
def test_an_island_on_each_process_and_one_that_is_killed(tmp_path):
    islands = 4
    settings = (
        ISLANDS
        | STREAMING
        | {
            "ici_diloco_parallelism": islands,
            "ici_fsdp_parallelism": 1,
            "steps": 5000,
            "eval_interval": -1,
            "learning_rate_schedule_steps": 60,
            "async_checkpointing": False,  # so that the checkpoint after 3 updates is complete after step 4
        }
    )
    with launched(tmp_path, islands, 1, **settings) as (launcher, log):
        wait_for("completed step: 4,", launcher, log)
        os.kill(process(launcher, islands - 1), signal.SIGKILL)
        assert launcher.wait(60) == 137, log.read_text()
    saved = int(newest(tmp_path / "runs/run").name)
    assert saved >= 3
    said = alone(tmp_path, islands, **settings | {"steps": saved + 2})
    assert f"checkpoints/{saved}: {saved} of {saved + 2} updates are done" in said
    (tmp_path / "straight").mkdir()
    alone(tmp_path / "straight", islands, **settings | {"steps": saved + 2, "checkpoint_period": 1000})
    found, expected = rows_of(tmp_path), rows_of(tmp_path / "straight")
    assert [(row["step"], row.keys()) for row in found] == [(row["step"], row.keys()) for row in expected]
    for name in ("loss", "island_losses", "grad_norm"):
        np.testing.assert_allclose([row[name] for row in found], [row[name] for row in expected], rtol=1e-5)
