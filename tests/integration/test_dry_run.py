"""`--dry-run` reports what a run would do, reports errors, and writes nothing."""

import re

import pytest
from run_cases import RUN, train

from trainer.observe.runs import open_run

pytestmark = pytest.mark.usefixtures("equal_programs")
SHORT = {"steps": 2, "learning_rate_schedule_steps": 2, "checkpoint_period": 1, "eval_interval": -1, "opt_type": "sgd"}
DRY = "--dry-run"


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_dry_run_says_what_the_run_then_does(tmp_path):
    code, said = train(tmp_path, DRY, learning_rate=1e-3, **SHORT)
    assert code == 0, said
    assert contents(tmp_path) == {}
    assert re.search(r"^learning_rate=0.001 \(command line\)$", said, re.MULTILINE)
    assert re.search(r"^memory +\d.* per device: state and batch ", said, re.MULTILINE)
    assert said.endswith(f"nothing was written to {RUN}\n")

    code, done = train(tmp_path, learning_rate=1e-3, **SHORT)
    assert code == 0, done
    table = [line for line in said.splitlines() if re.match(r"\w+  +\S", line)]
    assert [line.split()[0] for line in table][-4:] == ["data", "run", "memory", "FLOPs"]
    assert all(f"{line}\n" in done for line in table)

    before = contents(tmp_path)
    code, said = train(tmp_path, DRY, "run_name=run-0001", learning_rate=1e-3, **SHORT)
    assert (code, "runs/run-0001 is finished: nothing to do" in said) == (0, True), said
    assert said.endswith("dry run: nothing would run; nothing was written to runs/run-0001\n")
    code, said = train(tmp_path, DRY, "run_name=run-0001", learning_rate=1e-3, **SHORT | {"steps": 3})
    assert (code, "checkpoints/2: 2 of 3 updates are done" in said) == (0, True), said
    code, said = train(tmp_path, DRY, "run_name=run-0001", learning_rate=1e-3, **SHORT | {"base_mlp_dim": 24})
    assert (code, "base_mlp_dim: 32 -> 24" in said) == (2, True), said
    # Without run_name, the existing run is finished, so a new one would begin.
    more = {"enable_checkpointing": False, "metrics_file": tmp_path / "new" / "metrics.txt"}
    code, said = train(tmp_path, DRY, learning_rate=1e-3, **SHORT | more)
    assert said.endswith("nothing was written to runs/run-0002\n"), said
    code, said = train(tmp_path, DRY, "run_name=run-0001", learning_rate=1e-3, **SHORT | more)
    assert (code, "enable_checkpointing=false cannot resume it" in said) == (2, True), said
    with open_run(str(tmp_path / "runs"), "run-0001", "", True, print):
        before = contents(tmp_path)
        code, said = train(tmp_path, DRY, "run_name=run-0001", learning_rate=1e-3, **SHORT)
        assert (code, "is running in runs/run-0001; wait for it" in said) == (2, True), said
        assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "words",
    [
        "load_parameters_path=absent",
        "load_full_state_path=absent",
        "compiled_trainstep_file=absent",
        "dataset_type=grain grain_file_type=jsonl grain_train_files=absent.jsonl",
        "dataset_type=grain grain_file_type=mmap grain_train_files=absent",
        "stepz=3",
    ],
)
def test_what_is_wrong_with_the_command_is_wrong_with_its_dry_run(tmp_path, words):
    errors = []
    for more in ([], [DRY]):
        code, said = train(tmp_path, *words.split(), *more, **SHORT)
        assert code == 2, said
        errors.append(said[said.index("error: ") :])
    assert errors[0] == errors[1]
