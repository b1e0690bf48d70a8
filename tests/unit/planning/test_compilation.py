"""Compilations in processes: outcomes, limits, and the configuration's words."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import tiny_config

from trainer.config.keys import Config
from trainer.config.load import load
from trainer.config.resolve import frozen
from trainer.planning import compilation
from trainer.planning.compilation import Compiler

REPORT = """
import json, sys
path = sys.argv[-1].partition("=")[2]
names = ["peak_bytes", "hbm_bytes", "argument_bytes", "host_bytes", "flops", "hbm_bytes_accessed", "estimate", "mesh"]
run = {"kind": "all-gather", "bytes": 8, "conditional": False}
json.dump(dict.fromkeys(names, 5) | {"collectives": [run, run, run | {"conditional": True}]}, open(path, "w"))
"""


def compiled(code, compiler=None):
    compiler = compiler or Compiler()
    compiler._program = (sys.executable, "-c", code)
    row = compiler(tiny_config("nnx"))
    assert not Path(compiler._folder).exists()
    return row


@pytest.mark.parametrize(("end", "outcome"), [("", "fits"), ("sys.exit(3)", "does not fit")])
def test_the_report_becomes_a_row(end, outcome):
    row = compiled(REPORT + end)
    assert (row["outcome"], row["reason"]) == (outcome, "")
    assert row["report"]["network_bytes"] == 16
    assert row["wall_seconds"] > 0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the compiler was ended by SIGSEGV"),
        ("import sys; print('error: 2 mistakes:\\n  a\\n  b', file=sys.stderr); sys.exit(2)", "2 mistakes: a b"),
        ("raise RuntimeError('INTERNAL: x')", "RuntimeError: INTERNAL: x"),
        ("pass", "no output"),
        (REPORT + "sys.exit(1)", "no output"),
    ],
)
def test_failures_have_a_reason(code, reason):
    row = compiled(code)
    assert (row["outcome"], row["reason"], row["report"]) == ("failed", reason, {})


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_compiler_that_takes_too_much_memory_is_ended():
    compiler = Compiler()
    compiler._memory = 20 * 1024**2
    row = compiled("import time; x = bytes(1) * 200_000_000; time.sleep(60)", compiler=compiler)
    assert row["reason"].startswith("the compiler took more than 62.9 MB")
    assert row["wall_seconds"] < 50


def test_a_compiler_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(compilation, "_LEAST_SECONDS", 1.0)
    began = time.monotonic()
    row = compiled("import time; time.sleep(300)")
    assert (row["reason"], row["again"]) == ("the compiler took more than 1.00 s", True)
    assert time.monotonic() - began < 60


def test_a_failed_compilation_sets_no_limits():
    compiler = Compiler()
    compiled("import sys; sys.exit(2)", compiler)
    assert (compiler._memory, compiler._seconds) == (0, 0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="the end of the process is read from /proc")
def test_a_compilation_dies_with_its_plan(tmp_path):
    plan = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), *sys.argv[2:]])
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    report = tmp_path / "report.json"
    words = ["base.yml", "dataset_type=synthetic", "compile_topology=cpu-8", f"compile_report_file={report}"]
    command = [sys.executable, "-c", plan, compilation._TRAIN_COMPILE, *words]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == -signal.SIGKILL
    while runs(int(ended.stdout)):
        time.sleep(0.05)
    assert not report.exists()


def runs(pid):
    """Returns whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("words", [[], ["model_name=llama2-7b", "base_emb_dim=192", "base_num_decoder_layers=2"]])
def test_the_compiler_gets_the_configuration_of_the_point(tmp_path, words):
    """Its yml leads to the same values again, including values that a preset would override."""
    yml = tmp_path / "mine.yml"
    yml.write_text("base_config: base.yml\nlearning_rate: 0.5\nlogical_axis_rules: [['embed', []]]\n")
    words = [str(yml), "dataset_type=synthetic", *words, "trainable_parameters_mask=[embedding,norm]", "opt_type=muon"]
    config = load(words, environment={"M_STEPS": "20"}).config
    changes = {"per_device_batch_size": 0.5, "remat_policy": "full", "scan_layers": False, "learning_rate": 3e-05}
    point = Config({**config, **changes, "dump_hlo": True, "compiled_trainstep_file": "x"})
    copy = tmp_path / "copy.yml"
    code = f"import shutil, sys; shutil.copy(sys.argv[1], {str(copy)!r})"
    compiler = Compiler((sys.executable, "-c", code))
    compiler(point)
    again = load([str(copy)]).config
    assert {key: frozen(value) for key, value in again.items()} == {
        key: frozen(config[key]) for key in config
    } | changes
