"""scripts/benchmark_gpu.py on a CPU: it measures a tiny case, and names the cases that exceed the time limit."""

import importlib
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest(covered_by="its parts: the training step, the check of an accelerator")


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("benchmark_gpu")


def test_a_case_is_measured_and_the_next_one_is_left_out(benchmark, monkeypatch, tmp_path, capsys):
    clock, in_a_process = [0], benchmark.in_a_process

    def slow(*args):
        clock[0] += 200
        return in_a_process(*args)

    monkeypatch.setattr(benchmark, "in_a_process", slow)
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: clock[0])
    assert benchmark.main(["--small", "--seconds", "300", "--output", str(tmp_path / "found.json")]) == 0
    cases = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert [case["name"] for case in cases] == [case.name for case in benchmark.SMALL]
    assert cases[0]["seconds"] > 0
    assert cases[0]["temporaries"] > 0
    assert cases[1]["result"] == "left out: it may take 200 seconds, but only 100 are left"
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(cases)
    assert len({row.count("|") for row in rows}) == 1


def test_a_failure_is_told_and_saved(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "in_a_process", lambda *args: {"result": "FAILED: RESOURCE_EXHAUSTED"})
    assert benchmark.main(["--output", str(tmp_path / "found.json")]) == 1
    assert len(json.loads((tmp_path / "found.json").read_text())["cases"]) == len(benchmark.CASES) <= 8
    assert capsys.readouterr().out.count("RESOURCE_EXHAUSTED") == len(benchmark.CASES)


def test_without_an_accelerator_it_says_so(benchmark, capsys):
    assert benchmark.main(["--case", "0"]) == 2
    assert "no accelerator" in capsys.readouterr().err
