"""Whole pipeline runs, started as a user starts them: they end in several ways, and resume with any other pipeline."""

import os
import signal
import sys

import numpy as np
import pytest
from pipeline_cases import LAYERS, PER_STAGE, STAGES, M
from process_cases import alone, launched, process, wait_for
from process_cases import rows_of as rows_of_processes
from run_cases import RUN, arrays_of, killed_at, rows_of, train
from support import ALL_COMBINATIONS

from trainer.checkpoint.manager import newest
from trainer.export import main as export

KEYS = {
    "base_num_decoder_layers": 4,
    "per_device_batch_size": 2,
    "ici_fsdp_parallelism": -1,
    "sharding_tolerance": 1,
    "opt_type": "sgd",
    "steps": 4,
    "learning_rate_schedule_steps": 4,
    "checkpoint_period": 2,
    "eval_interval": 4,
    "eval_steps": 1,
    "run_name": RUN.name,
    "normalize_embedding_logits": False,  # Hugging Face has no such scaling
}
TWO = {STAGES: 2, M: 4}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns the folder of an uninterrupted run with two stages and two repeats."""
    folder = tmp_path_factory.mktemp("straight")
    code, output = train(folder, devices=8, **KEYS, **TWO)
    assert code == 0, output
    assert "pipeline     2 stages x 2 repeats x 1 layer; 4 microbatches in 9 iterations, 11.1% of them idle" in output
    return folder / RUN


def losses(run):
    return [row[name] for row in rows_of(run) for name in ("loss", "eval_loss", "grad_norm") if name in row]


@pytest.mark.rest(covered_by="unit/state/test_stages.py, and losses in integration/test_pipeline.py")
@pytest.mark.parametrize(
    "keys",
    [
        {STAGES: 4},
        {STAGES: 1},
        {STAGES: 2, LAYERS: 2},
        {STAGES: 2, PER_STAGE: 2, "combination": ALL_COMBINATIONS[-1]},
    ],
    ids=str,
)
def test_a_run_goes_on_with_another_pipeline(straight, tmp_path, keys):
    run = killed_at(2, straight, tmp_path)
    code, output = train(tmp_path, devices=8, **KEYS | keys)
    assert code == 0, output
    assert "checkpoints/2: 2 of 4 updates are done" in output
    found, expected = losses(run), losses(straight)
    assert len(found) == len(expected) == 9  # two per step, and one for the evaluation after the last step
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # sums are added in another order
    left, right = (arrays_of(folder / "checkpoints/4") for folder in (run, straight))
    assert left.keys() == right.keys()
    assert left["params/decoder/layers/mlp/wo/kernel"].shape == (4, 32, 16)
    for name, array in left.items():
        np.testing.assert_allclose(array, right[name], rtol=0, atol=1e-4 * max(np.abs(right[name]).max(), 1e-9))


@pytest.mark.rest(covered_by="losses of runs that go on")
def test_equal_sums_have_equal_bits(straight, tmp_path):
    """Pipelines with the same microbatches add them up in the same order."""
    run = killed_at(2, straight, tmp_path)
    code, output = train(tmp_path, devices=8, **KEYS, **TWO, scan_pipeline_iterations=True)
    assert code == 0, output
    assert rows_of(run) == rows_of(straight)
    left, right = (arrays_of(folder / "checkpoints/4") for folder in (run, straight))
    assert {name: array.tobytes() for name, array in left.items()} == {k: v.tobytes() for k, v in right.items()}


def test_a_run_is_exported_as_without_a_pipeline(straight, tmp_path):
    for form in ("params", "hf"):
        export([str(straight), str(tmp_path / form), f"format={form}"])
    found = arrays_of(straight / "checkpoints/4")
    export([str(tmp_path / "params"), str(tmp_path / "back"), "format=hf"])
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("hf", "back")]
    assert files[0] == files[1]
    from safetensors.numpy import load_file

    written = load_file(tmp_path / "hf/model.safetensors")
    kernel = found["params/decoder/layers/mlp/wo/kernel"]
    for i in range(4):
        np.testing.assert_array_equal(written[f"model.layers.{i}.mlp.down_proj.weight"], kernel[i].T)


@pytest.mark.rest(covered_by="stages in one process; integration/test_processes.py")
@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("processes", [2, 4])
def test_stages_on_processes(tmp_path, processes):
    """Each process is a stage. One is killed, and the run resumes in one process with another number of stages."""
    keys = {"base_num_decoder_layers": 4, "sharding_tolerance": 1, "eval_interval": -1}
    on_stages = keys | {STAGES: processes, "ici_fsdp_parallelism": -1}
    with launched(tmp_path, processes, 4 // processes, **on_stages) as (launcher, log):
        wait_for("completed step: 9,", launcher, log)
        os.kill(process(launcher, processes - 1), signal.SIGKILL)
        assert launcher.wait(60) == 137, log.read_text()
        said = log.read_text()
    assert f"{processes} stages x" in said
    last = int(newest(tmp_path / "runs/run").name)
    assert last >= 4
    said = alone(tmp_path, 4, **keys, steps=last + 2, **{STAGES: 1 if processes == 4 else 4})
    assert f"checkpoints/{last}: {last} of {last + 2} updates are done" in said
    (tmp_path / "straight").mkdir()
    alone(tmp_path / "straight", 4, **keys, steps=last + 2, checkpoint_period=1000)
    found, expected = (
        [row["loss"] for row in rows_of_processes(folder)] for folder in (tmp_path, tmp_path / "straight")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
