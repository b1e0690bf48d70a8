"""dump_hlo: XLA's text of the training step, even if the compilation cache contains the step."""

import contextlib
from types import SimpleNamespace

import jax
import pytest
from support import arguments
from without_model import OfParameters

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.training import compiled
from trainer.training.build import build
from trainer.training.compiled import compiled_step, loaded_step

STEP = {
    "ici_fsdp_parallelism": 2,
    "opt_type": "sgd",
    "gradient_clipping_threshold": 0,
    "remat_policy": "full",
}


def test_the_dump_has_the_step_and_changes_nothing(tmp_path):
    keys = {"dump_hlo_local_dir": tmp_path / "new" / "hlo", **STEP}
    programs, said = [], []
    for dump_hlo in (False, True):  # otherwise the second compilation would find the first program in the cache
        config = load(arguments("nnx", dump_hlo=dump_hlo, **keys)).config
        run = build(config, jax.devices()[:2], make_objective=lambda config, model: OfParameters())
        programs.append(compiled_step(run, tmp_path, said.append).as_text())
    assert programs[0] == programs[1]
    said_of = "compiling the training step"
    assert said == [said_of, said_of, f"XLA's dump of the training step is in {tmp_path / 'new' / 'hlo'}"]
    for ending in ("before_optimizations", "before_spmd-partitioning", "cpu_after_optimizations", "buffer-assignment"):
        (path,) = (tmp_path / "new" / "hlo").glob(f"*.jit_step.*{ending}.txt")
        assert path.stat().st_size > 1000


def test_a_compiled_step_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = build(load(arguments("nnx", compiled_trainstep_file="~/absent")).config, jax.devices()[:1])
    with pytest.raises(UserError, match=f"compiled_trainstep_file={tmp_path}/absent"):
        loaded_step(run, print)


def test_a_folder_that_cannot_be_written_is_refused_before_compilation(tmp_path):
    (tmp_path / "file").touch()
    config = load(arguments("nnx", dump_hlo=True, dump_hlo_local_dir=tmp_path / "file" / "hlo")).config
    said = []
    with pytest.raises(UserError, match=r"dump_hlo_local_dir=.*/file/hlo: cannot be written \(Not a directory\)"):
        compiled_step(build(config, jax.devices()[:1]), tmp_path, said.append)
    assert said == []


def test_what_a_signal_prints_holds_for_a_run_that_goes_on_too(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(compiled, "ends_at_signals", lambda text: said.append(text) or contextlib.nullcontext())
    monkeypatch.setattr(compiled, "_say_what_fits", lambda *args: None)
    lowered = SimpleNamespace(compile=lambda options: "step")
    traced = SimpleNamespace(lower=lambda: lowered)
    run = SimpleNamespace(config=SimpleNamespace(dump_hlo=False), trace_on_leaves=lambda: traced)
    assert compiled_step(run, "runs/x", lambda line: None) == "step"
    assert said == ["stopped while compiling; no update is lost; run the same command to start again (runs/x)"]


def test_a_policy_that_saves_more_is_named_where_it_would_fit(tmp_path, monkeypatch):
    """A CPU reports no memory size, so the step of the first test prints no hint."""
    monkeypatch.setattr(compiled, "reported_memory", lambda devices: 10**9)
    said = []
    compiled_step(build(load(arguments("nnx", **STEP)).config, jax.devices()[:2]), tmp_path, said.append)
    _, line = said
    assert line.startswith(
        "remat_policy=full leaves memory unused: remat_policy=minimal_with_context would take about "
    )
    assert line.endswith(" of 1.00 GB per device, and norms and activation functions are recomputed")
