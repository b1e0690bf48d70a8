"""metrics.jsonl reads back as it was written."""

import json
import math

import numpy as np
import pytest

from trainer.observe import MetricsWriter


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_floats_come_back_to_the_bit(tmp_path):
    row = {"step": 0, "loss": 0.1 + 0.2, "lm_loss": float(np.float32(1 / 3)), "tokens": 2**53 + 1, "note": "ä\n"}
    with MetricsWriter(tmp_path) as writer:
        writer.write(row)
    assert read(tmp_path) == [row]


def test_values_that_are_not_finite(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write({"loss": math.nan, "grad_norm": math.inf, "z": -math.inf})
    (row,) = read(tmp_path)
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["z"]) == (math.inf, -math.inf)


def test_each_row_is_on_disk_when_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(3):
            writer.write({"step": step})
            assert [row["step"] for row in read(tmp_path)] == list(range(step + 1))


def test_rows_are_appended(tmp_path):
    for step in range(2):
        with MetricsWriter(tmp_path) as writer:
            writer.write({"step": step})
    assert [row["step"] for row in read(tmp_path)] == [0, 1]


def test_an_array_is_refused_and_leaves_no_trace(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(TypeError):
            writer.write({"step": 0, "loss": np.float32(1)})
        writer.write({"step": 1})
    assert read(tmp_path) == [{"step": 1}]


def test_leaving_the_context_closes(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        pass
    with pytest.raises(ValueError, match="closed file"):
        writer.write({"step": 0})
