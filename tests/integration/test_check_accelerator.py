"""scripts/check_accelerator.py with tiny sizes on a CPU: it reports a wrong kernel and continues."""

import importlib
import re
from pathlib import Path

import jax
import pytest

from trainer.layers.attention import OPS

pytestmark = pytest.mark.rest(covered_by="its parts: ops, combinations, checkpoints, the engine")


@pytest.fixture
def check_accelerator(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("check_accelerator")


def test_a_wrong_kernel_is_named_and_the_rest_passes(check_accelerator, monkeypatch, capsys):
    blockwise = OPS["blockwise"]

    def wrong(*args, window=0, **how):
        return blockwise(*args, window=window and window + 1, **how)  # includes one key too many

    monkeypatch.setitem(OPS, "blockwise", wrong)
    code = check_accelerator.main(["--small"], jax.devices()[:1])
    said = capsys.readouterr().out
    results = dict(re.findall(r"^\| ([^|]+) \| (ok|FAILED|left out) \| [^|]+ \|$", said, re.MULTILINE))
    assert code == 1
    windows = ["attention blockwise, window", "attention blockwise, window, one document"]
    assert said.endswith(f"failed: {'; '.join(windows)}\n")
    others = {what: result for what, result in results.items() if what not in windows}
    # The table of chips has no entry for CPUs.
    assert [what for what, result in others.items() if result != "ok"] == ["its time beside the estimate"], said
    ops = [f"attention blockwise, {variant}" for variant in importlib.import_module("accelerator_kernels").VARIANTS]
    combinations = [what for what in results if what.endswith(" beside nnx")]
    assert {*ops, "grouped products", "a checkpoint to a CPU and back", "a training step", "decode steps"} <= {*results}
    assert len(combinations) == len(check_accelerator.MODELS) - 1
    assert all("equal bits" in line for line in said.splitlines() if " beside nnx " in line)


def test_without_an_accelerator_it_says_so(check_accelerator, capsys):
    assert check_accelerator.main([], jax.devices("cpu")[:1]) == 2
    assert "no accelerator" in capsys.readouterr().err
