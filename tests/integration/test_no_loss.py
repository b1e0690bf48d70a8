"""Runs with batches in which no token bears loss."""

import contextlib
import json
import math
import signal

import jax
import numpy as np
import pytest
from run_cases import RUN, command, rows_of
from support import TINY, arguments, pinned

from trainer.config.errors import RunStopped
from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.training import loop
from trainer.training.build import build
from trainer.training.loop import Reports, fit
from trainer.training.start import Start

pytestmark = pytest.mark.usefixtures("equal_programs")
LONG, SHORT = {"prompt": "p" * 40, "completion": "c"}, {"prompt": "p", "completion": "cc"}
SMALL = {
    "dataset_type": "grain",
    "grain_file_type": "jsonl",
    "grain_train_files": "a.jsonl",
    "train_data_columns": "[prompt,completion]",
    "eval_data_columns": "[prompt,completion]",
    "data_cache_directory": "cache",
    "tokenizer_type": "bytes",
    "vocab_size": 300,
    "use_truncation": True,
    "packing": False,
    "held_out_share": 0,
    "enable_data_shuffling": False,
    "per_device_batch_size": 2,
    "prompt": "",
    "base_num_decoder_layers": 1,
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns run(rows, **keys), which returns the exit code and output of a run on these rows."""
    monkeypatch.chdir(tmp_path)

    def started(rows, **keys):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return command(TINY | pinned("nnx") | SMALL | keys)

    return started


@pytest.mark.parametrize("way", ["prepared", "streaming"])
def test_no_loss_at_all_ends_before_anything_is_compiled(run, way):
    code, output = run([LONG] * 6, data_pipeline=way)
    assert code == 2, output
    assert "0 of 96 tokens contribute to the loss, in 6 documents" in output
    assert "compiling" not in output


def test_evaluation_batches_without_loss_end_before_anything_is_compiled(run, tmp_path):
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [LONG, LONG, SHORT]))
    code, output = run([SHORT] * 4, eval_interval=2, eval_steps=1, grain_eval_files="b.jsonl")
    assert code == 2, output
    assert "eval_steps=1: 0 of 32 tokens contribute to the loss" in " ".join(output.split())
    assert "compiling" not in output


def test_a_batch_without_loss_is_left_out(run, tmp_path):
    code, output = run([LONG] * 4 + [SHORT] * 40, steps=4, data_pipeline="streaming")
    assert code == 0, output
    found = rows_of(tmp_path / RUN)
    assert [(row["tokens"], row["skipped"]) for row in found] == [(0, 1), (0, 1), (6, 0), (6, 0)]
    assert [math.isnan(row["loss"]) for row in found] == [True, True, False, False]
    assert "step 0: no token in its batch contributes to the loss: its update is skipped" in output
    assert "2 updates whose batch had no token with a loss" in output


@pytest.mark.parametrize("on_start", [False, True])
def test_a_run_that_learned_nothing_stays_refused(run, tmp_path, on_start):
    """Only the last rows bear loss, and the run ends before it reaches them."""
    rows, keys = [LONG] * 12 + [SHORT] * 2, {"data_pipeline": "streaming", "enable_checkpointing": True}
    keys["save_checkpoint_on_start"] = on_start
    for _ in range(2):
        code, output = run(rows, steps=4, checkpoint_period=2, run_name="x", **keys)
        assert code == 1, output
        assert "0 tokens contribute to the loss in the 2 batches of this run" in output
    saved = {path.name for path in (tmp_path / "runs/x/checkpoints").iterdir() if path.name.isdecimal()}
    assert saved == ({"0"} if on_start else set())


@pytest.mark.parametrize(
    ("tokens", "before", "sigterm", "stops"),
    [
        ([0, 0], 0, False, True),
        ([0, 3], 0, False, False),
        ([0, 0], 1, False, False),
        ([0], 0, True, False),
    ],
)
def test_a_run_whose_batches_bear_no_loss_is_stopped(tokens, before, sigterm, stops, monkeypatch):
    """A resumed run may have loss-free batches, because earlier ones bore loss.

    After SIGTERM, there is no error and nothing to save.
    """
    left, saves = iter(tokens), []

    def step(leaves, batch, frozen):
        count = next(left)
        if sigterm:
            signal.raise_signal(signal.SIGTERM)
        values = {
            "loss": 1.0 if count else math.nan,
            "grad_norm": 1.0,
            "skipped": int(not count),
            "tokens": count,
            "finite": 1,
        }
        return leaves, {name: np.asarray(value) for name, value in values.items()}

    monkeypatch.setattr(loop, "maybe_save_checkpoint", lambda *args, force, **rest: saves.append(force))
    built = build(load(arguments("nnx", steps=before + 2)).config, jax.devices()[:1])
    dataset = open_dataset(built.config, print)
    rows = []
    reports = Reports(rows.append, lambda row: None, lambda: None)
    started = Start([], updates=before, resumed=before > 0)
    with (
        pytest.raises(RunStopped, match=r"0 tokens contribute to the loss in the 2 batches")
        if stops
        else contextlib.nullcontext()
    ):
        fit(built, step, started, dataset, reports)
    assert [row["tokens"] for row in rows] == tokens
    assert not any(saves)
