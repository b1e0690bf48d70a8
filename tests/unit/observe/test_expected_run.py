"""A dry run predicts the folder that the run then gets."""

import os

import pytest
from run_dir_cases import CONFIG, begun, close, finished, opened

from trainer.config.errors import UserError
from trainer.observe.runs import check_earlier, expected_run


@pytest.fixture(autouse=True)
def closed():
    yield
    close()


def _unfinished(base):
    begun(base)
    finished(base)


def _numbered_in_use(base):
    begun(base).joinpath("config.yml").write_text(CONFIG)
    opened(base)


def _named_in_use(base):
    opened(base, "mine")


def _with_checkpoints(base):
    (begun(base, "mine") / "checkpoints" / "5").mkdir(parents=True)


def _file(base):
    base.touch()


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("name", ["", "mine"])
@pytest.mark.parametrize(
    "prepare",
    [lambda base: None, begun, finished, _unfinished, _numbered_in_use, _named_in_use, _with_checkpoints, _file],
)
def test_a_dry_run_expects_the_folder_that_a_run_then_gets(tmp_path, prepare, name, resumes):
    base = tmp_path / "runs"
    prepare(base)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    found = []
    for choose in (expected_run, lambda *args: opened(*args).path):
        try:
            found.append(choose(str(base), name, CONFIG, resumes))
        except UserError as error:
            found.append(str(error))
        if choose is expected_run:
            assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert found[0] == found[1]


@pytest.mark.parametrize("at", ["", "new/newer"])
def test_a_dry_run_sees_that_a_folder_is_not_writable(tmp_path, monkeypatch, at):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(UserError, match=r"cannot write there \(Permission denied\); choose a writable folder"):
        expected_run(str(tmp_path / at), "mine", CONFIG, True)


def test_a_dry_run_says_what_becomes_of_earlier_metrics(tmp_path):
    said = []
    check_earlier(tmp_path, CONFIG, 0, False, said.append)
    check_earlier(begun(tmp_path, "mine"), CONFIG, 0, True, said.append)
    assert said == []
    check_earlier(tmp_path / "mine", CONFIG, 0, False, said.append)
    assert said.pop() == f"{tmp_path / 'mine'} has no checkpoint yet: starting over"
    check_earlier(tmp_path / "mine", CONFIG, 3, True, said.append)
    assert said.pop() == f"{tmp_path / 'mine'}/metrics.jsonl lacks the rows of 3 earlier steps"
    (tmp_path / "mine" / "samples.jsonl").write_text("garbage\n")
    with pytest.raises(UserError, match=r"samples.jsonl is damaged: line 1"):
        check_earlier(tmp_path / "mine", CONFIG, 3, True, said.append)
    with pytest.raises(UserError, match="whose checkpoints are gone"):
        check_earlier(finished(tmp_path, "other"), CONFIG, 0, False, said.append)
    without = "enable_checkpointing: false\n"
    check_earlier(finished(tmp_path, "third", without, False), without, 0, False, said.append)
    assert said.pop() == f"{tmp_path / 'third'} holds an earlier run: its files would be kept under other names"
