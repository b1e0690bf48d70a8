"""Compilations in processes: outcomes, limits, and the words of a configuration."""

import sys
import time
from pathlib import Path

import pytest
from support import arguments

from trainer.config.load import load
from trainer.planning import compilation
from trainer.planning.compilation import Compiler, words_of

REPORT = """
import json, sys
path = sys.argv[-1].partition("=")[2]
names = ["peak_bytes", "hbm_bytes", "argument_bytes", "host_bytes", "flops", "hbm_bytes_accessed", "estimate", "mesh"]
run = {"kind": "all-gather", "bytes": 8, "conditional": False}
json.dump(dict.fromkeys(names, 5) | {"collectives": [run, run, run | {"conditional": True}]}, open(path, "w"))
"""


def compiled(code, *words, compiler=None):
    compiler = compiler or Compiler()
    compiler._program = (sys.executable, "-c", code)
    return compiler(words)


@pytest.mark.parametrize(("end", "outcome"), [("", "fits"), ("sys.exit(3)", "does not fit")])
def test_the_report_becomes_a_row(end, outcome):
    row = compiled(REPORT + end, "steps=1")
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
    compiler.memory = 20 * 1024**2
    row = compiled("import time; x = bytes(1) * 200_000_000; time.sleep(60)", compiler=compiler)
    assert row["reason"].startswith("the compiler took more than 62.9 MB")
    assert row["wall_seconds"] < 50


def test_a_compiler_that_takes_too_long_is_ended_with_its_children(monkeypatch, tmp_path):
    monkeypatch.setattr(compilation, "_LEAST_SECONDS", 1.0)
    began, pid = time.monotonic(), tmp_path / "pid"
    code = "import subprocess; p = subprocess.Popen(['sleep', '300']); "
    code += f"open({str(pid)!r}, 'w').write(str(p.pid)); p.wait()"
    row = compiled(code)
    assert row["reason"] == "the compiler took more than 1.00 s"
    assert time.monotonic() - began < 60
    for _ in range(100):
        state = Path(f"/proc/{pid.read_text()}/stat")
        if not state.exists() or " Z " in state.read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the compiler's child still runs")


def test_the_words_give_the_configuration_again(tmp_path):
    yml = tmp_path / "mine.yml"
    yml.write_text("base_config: base.yml\nlearning_rate: 0.5\nlogical_axis_rules: [['embed', []]]\n")
    words = [*arguments("nnx", model_name="default")[1:], "trainable_parameters_mask=[embedding,norm]", "opt_type=muon"]
    config = load([str(yml), *words], environment={"M_STEPS": "20"}).config
    changes = {"per_device_batch_size": 0.5, "remat_policy": "full", "scan_layers": False, "learning_rate": 3e-05}
    again = load(["base.yml", *words_of(config, changes)]).config
    expected = dict(config.items()) | changes
    assert dict(again.items()) == expected
