"""Whole runs with context parallelism, started as a user starts them."""

import os
import signal
import sys

import numpy as np
import pytest
from process_cases import alone, launched, process, rows_of, wait_for

from trainer.checkpoint.manager import newest

CONTEXT, STRATEGY = "ici_context_parallelism", "context_parallel_strategy"
KEYS = {"sharding_tolerance": 1, "dropout_rate": 0, "eval_interval": -1}


@pytest.mark.rest(covered_by="arrays that pass as one in unit/layers/test_across.py; integration/test_processes.py")
@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("devices", [4, 2])
def test_processes_share_rows(tmp_path, devices):
    """Either one ring spans all devices, or each process has a ring, combined with fsdp.

    One process is killed, and a single process resumes without context parallelism.
    """
    with launched(tmp_path, 2, 2, **KEYS, **{CONTEXT: devices, STRATEGY: "ring", "ici_fsdp_parallelism": -1}) as (
        launcher,
        log,
    ):
        wait_for("completed step: 9,", launcher, log)
        os.kill(process(launcher, 1), signal.SIGKILL)
        assert launcher.wait(60) == 137, log.read_text()
    last = int(newest(tmp_path / "runs/run").name)
    assert last >= 4
    said = alone(tmp_path, 4, **KEYS, steps=last + 2)
    assert f"checkpoints/{last}: {last} of {last + 2} updates are done" in said
    (tmp_path / "straight").mkdir()
    alone(tmp_path / "straight", 4, **KEYS, steps=last + 2, checkpoint_period=1000)
    found, expected = ([row["loss"] for row in rows_of(folder)] for folder in (tmp_path, tmp_path / "straight"))
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # sums are added in another order
