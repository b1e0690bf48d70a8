"""`python -m trainer.train` as a user runs it."""

import gzip
import json
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest
import yaml
from again import sharing_programs
from compiler import xla_flags
from run_cases import command
from sample_data import write_records
from support import TINY, arguments, pinned

from trainer.config.dump import PROCESSES, SUPERVISION
from trainer.config.schema import schema
from trainer.train import main

SOURCES = Path(__file__).parents[2] / "src/trainer/config"
STEP_FIELDS = {
    "step",
    "loss",
    "lm_loss",
    "grad_norm",
    "skipped",
    "learning_rate",
    "tokens",
    "tokens_seen",
    "step_time",
    "tokens_per_second",
    "data_wait",
}
MAXTEXT_LINE = re.compile(
    r"^completed step: \d+, seconds: \d+\.\d{3}, TFLOP/s/device: \d+\.\d{3}, Tokens/s/device: \d+\.\d{3}, "
    r"total_weights: \d+, loss: \d+\.\d{3}, lm_loss: \d+\.\d{3}, perplexity: \d+\.\d{3}(, |$)"
)
# A real run on text, small enough for the test suite. CI trains on Python's sources with the README's first command.
TEXT = (
    TINY
    | pinned("nnx")
    | {
        "dataset_type": "grain",
        "grain_file_type": "jsonl",
        "held_out_share": 0.2,
        "vocab_size": 512,
        "max_target_length": 64,
        "steps": 12,
        "eval_interval": 6,
        "eval_steps": 2,
        "learning_rate": 1e-2,
        "enable_checkpointing": True,
    }
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns the keys for a text, made of sources of this project, and for the folder of its prepared data."""
    folder = tmp_path_factory.mktemp("corpus")
    # The number of documents is large enough that some are held out, however the sources change.
    parts = [part for source in sorted(SOURCES.glob("*.py")) for part in source.read_text().split("\n\n\n")]
    write_records(folder / "sources.jsonl", "jsonl", [{"text": part} for part in parts])
    return {"grain_train_files": folder / "sources.jsonl", "data_cache_directory": folder / "cache"}


def run_module(*args, cwd, devices=1, **environment):
    env = os.environ | {"XLA_FLAGS": xla_flags(devices)} | environment
    command = [sys.executable, "-m", "trainer.train", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def rows_of(run_dir: Path) -> tuple[list[dict], list[dict]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row], [row for row in rows if "eval_loss" in row]


def steps_of_profile(run_dir: Path) -> list[int]:
    """Returns the steps in the run's only trace, which must have a compressed memory profile."""
    (place,) = (run_dir / "tensorboard" / "plugins" / "profile").iterdir()
    assert gzip.decompress((place / "memory.prof").read_bytes())
    (trace,) = place.glob("*.xplane.pb")
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(trace)).planes for line in plane.lines]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a jaxlib 0.12 warning
        stats = [dict(event.stats) for line in lines for event in line.events if event.name == "train"]
    return sorted(each["step_num"] for each in stats)


def test_a_run_on_text_from_any_folder_without_a_yml(tmp_path, corpus, monkeypatch, capsys):
    found = jax.devices()[:1]
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(jax, "devices", lambda: found)
        main([f"{k}={v}" for k, v in (TEXT | corpus).items()])
    printed = capsys.readouterr().out
    assert "run-0001" in printed
    run_dir = tmp_path / "runs" / "run-0001"

    steps, evaluations = rows_of(run_dir)
    assert [row["step"] for row in steps] == list(range(12))
    assert all(set(row) == STEP_FIELDS for row in steps)
    assert all(row["loss"] == row["lm_loss"] for row in steps)
    # The last token of a document has no target, and the last row of the text is only partly filled.
    fewest, *others = sorted(row["tokens"] for row in steps)
    assert fewest > 3 * 60
    assert all(4 * 60 < tokens <= 4 * 64 for tokens in others)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [row["step"] for row in evaluations] == [5, 11]
    for row in evaluations:
        assert math.isclose(row["eval_perplexity"], math.exp(row["eval_loss"]))
        assert 0 < row["eval_bits_per_byte"] < 8

    lines = [line for line in printed.splitlines() if line.startswith("completed step")]
    assert len(lines) == 12
    assert all(MAXTEXT_LINE.match(line) for line in lines)
    assert "continues 'def '" in printed
    assert "bits per byte" in printed
    assert "training a BPE" in printed
    (sample,) = map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines())
    assert (sample["step"], sample["prompt"]) == (12, "def ")
    assert sample["text"].startswith("def ")
    page = (run_dir / "report.html").read_text()
    assert "<p>After 12 updates:</p><pre><b>def </b>" in page
    assert re.search(r"<td>steps</td><td>12</td><td>\d+</td><td>command line</td>", page)

    # The last checkpoint has sidecar metadata beside its arrays.
    beside = run_dir / "checkpoints" / "12" / "run"
    assert (beside / "config.yml").read_text() == (run_dir / "config.yml").read_text()
    assert json.loads((beside / "tokenizer" / "tokenizer.json").read_text())["model"]["type"] == "BPE"

    # The resolved configuration is complete: without changes, it runs again on the prepared data, with the same losses.
    resolved = yaml.safe_load((run_dir / "config.yml").read_text())
    assert resolved["dtype"] == "float32"
    assert set(schema().keys) - set(resolved) == {"run_name", *PROCESSES, *SUPERVISION}
    # Profiling some steps changes no result, and neither does a missing sample. Needs another process: JAX's profiler
    # crashes where libtpu has been loaded.
    profiled = ["prompt=", "profiler=xplane", "skip_first_n_steps_for_profiler=2", "profiler_steps=3"]
    again = run_module(str(run_dir / "config.yml"), *profiled, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert steps_of_profile(tmp_path / "runs" / "run-0002") == [2, 3, 4]
    assert "the profile of 3 steps from step 2 on is in runs/run-0002/tensorboard/plugins/profile/" in again.stdout
    assert "training a BPE" not in again.stdout
    page = (tmp_path / "runs" / "run-0002" / "report.html").read_text()
    assert re.search(r"<td>steps</td><td>12</td><td>\d+</td><td>[^<]*runs/run-0001/config.yml:\d+</td>", page)
    repeated, _ = rows_of(tmp_path / "runs" / "run-0002")
    for name in ("loss", "grad_norm"):  # the same command leads to the same bits
        assert [row[name] for row in repeated] == [row[name] for row in steps]


def test_runs_are_numbered_and_nothing_is_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = TINY | pinned("nnx") | {"steps": 1, "opt_type": "sgd"}
    with sharing_programs():
        assert command(keys)[0] == command(keys)[0] == 0
        assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["run-0001", "run-0002"]
        before = (tmp_path / "runs/run-0002/metrics.jsonl").read_text()
        _, said = command(keys, "run_name=run-0002")
    assert "its files are kept as metrics-1.jsonl, config-1.yml" in said
    assert (tmp_path / "runs/run-0002/metrics-1.jsonl").read_text() == before
    steps, _ = rows_of(tmp_path / "runs" / "run-0002")
    assert len(steps) == 1


def test_a_mistake_is_told_before_jax_is_loaded_and_leaves_nothing_behind(tmp_path):
    code = (
        "import sys\nfrom trainer.train import main\n"
        "try: main(sys.argv[1:])\nfinally: print('jax' in sys.modules, 'flax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "base.yml", "stps=10", "learning_rate=fast", "remat_policy=ful"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout.split() == ["False", "False"]
    assert "Traceback" not in done.stderr
    for expected in ("stps", "nearest: steps", "learning_rate", "remat_policy", "nearest: full"):
        assert expected in done.stderr
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_the_devices_is_told_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(arguments("nnx", ici_fsdp_parallelism=3, ici_tensor_parallelism=2))
    assert exit_.value.code == 2
    assert "fsdp 3 x tensor 2 = 6" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_prompt_that_fills_the_row_is_refused_before_training(tmp_path, corpus, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = TEXT | corpus | {"prompt": "def a_function_of_many(arguments, and_more, and_another): return None" * 3}
    with pytest.raises(SystemExit) as exit_:
        main([f"{k}={v}" for k, v in settings.items()])
    assert exit_.value.code == 2
    assert "prompt" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
