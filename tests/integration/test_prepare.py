"""trainer.prepare as a command: processes that die, and training that continues on other data."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from run_cases import command
from sample_data import document, write_corpus
from support import TINY, pinned

from trainer import prepare

pytestmark = pytest.mark.usefixtures("equal_programs")
SMALL = TINY | pinned("nnx") | {"opt_type": "sgd", "learning_rate_schedule_steps": 4, "checkpoint_period": 1}
SMALL |= {"vocab_size": 300, "max_target_length": 32, "eval_interval": 4, "per_device_batch_size": 2, "prompt": ""}
SMALL |= {"prepare_workers": 1}


# A shell starts background processes with SIGINT ignored.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
runpy.run_module("trainer.prepare", run_name="__main__", alter_sys=True)
"""


def start(folder: Path, out: str) -> subprocess.Popen[str]:
    words = ["dataset_type=grain", "grain_file_type=jsonl", "grain_train_files=big.jsonl", "max_target_length=64"]
    words += [
        "tokenizer_type=bytes",
        "vocab_size=300",
        "prepare_part_mib=0.25",
        "prepare_workers=2",
        "eval_interval=-1",
    ]
    words += ["held_out_share=0", f"out={out}"]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", INTERRUPTIBLE, *words], cwd=folder, **pipes)


def workers_of(pid: int) -> list[int]:
    """Returns the worker processes of a trainer.prepare process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def finished(place: Path) -> set[Path]:
    return {path for path in place.glob("train-*/part-*") if path.suffix != ".tmp"}


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.rest(covered_by="the first victim", cases=("worker", "interrupted"))
@pytest.mark.parametrize("victim", ["command", "worker", "interrupted"])
def test_a_process_that_dies_repeats_no_finished_part(tmp_path: Path, victim: str):
    with (tmp_path / "big.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": f"{i} " + document(i) * 20}) + "\n" for i in range(3000))
    child = start(tmp_path, "place")
    while len(finished(tmp_path / "place")) < 2:
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)
    workers = workers_of(child.pid)
    assert len(workers) == 2
    kept = {path: (path / "rows.npy").stat().st_mtime_ns for path in finished(tmp_path / "place")}
    os.kill(
        workers[0] if victim == "worker" else child.pid, signal.SIGINT if victim == "interrupted" else signal.SIGKILL
    )
    _, errors = child.communicate(timeout=30)
    assert child.returncode == {"worker": 2, "command": -signal.SIGKILL, "interrupted": -signal.SIGINT}[victim]
    assert ("same command continues" in errors) == (victim != "command")
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "the workers outlive the command"
        time.sleep(0.05)
    again = start(tmp_path, "place")
    output, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert "rows of 64 tokens" in output
    (train,) = (tmp_path / "place").glob("train-*")
    names = {path.name: (path / "rows.npy").stat().st_mtime_ns for path in finished(tmp_path / "place")}
    assert all(names[path.name] == then for path, then in kept.items())
    assert json.loads((train / "meta.json").read_text())["documents"] == 3000
    assert not [*(tmp_path / "place").glob("*-*.tmp"), *(tmp_path / "place").glob("*-*.lock")]


def test_a_run_goes_on_with_the_prepared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    data = {"dataset_type": "grain", "grain_file_type": "jsonl", "prepare_part_mib": 0.002, "held_out_share": 0.2}
    data |= {"grain_train_files": f"{write_corpus(tmp_path / 'a', 'jsonl', 40)}/*,0.7;{tmp_path}/a/0*,0.3"}
    shared = SMALL | data | {"data_cache_directory": tmp_path / "cache", "enable_checkpointing": True}
    code, output = command(shared | {"steps": 4}, "run_name=whole")
    assert code == 0, output
    assert "mixture      70.0% of the rows from" in output
    words = [f"{name}={value}" for name, value in data.items()]
    prepare.main([*words, "prepare_workers=1", "max_target_length=32", "vocab_size=300", "out=place"])
    assert command(shared | {"steps": 2}, "run_name=part")[0] == 0
    (tmp_path / "a").rename(tmp_path / "away")
    keys = {name: value for name, value in shared.items() if name not in data}
    code, output = command(keys | {"prepared_path": "place", "steps": 3}, "run_name=part")
    assert code == 0, output
    (tmp_path / "place").rename(tmp_path / "moved")
    code, output = command(keys | {"prepared_path": "moved", "steps": 4}, "run_name=part")
    assert code == 0, output
    losses = []
    for name in ("whole", "part"):
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses.append({row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row})
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert np.isfinite([*losses[0].values()]).all()
