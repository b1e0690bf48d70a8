"""Folders that a user passes: links out of them, pipes and devices are refused, and writes follow no link."""

import os
import socket

import pytest

from trainer.config.errors import UserError
from trainer.observe.events import EventsWriter
from trainer.observe.metrics import MetricsWriter
from trainer.observe.report_file import ReportFile
from trainer.observe.runs import expected_run, open_run
from trainer.runtime.folders import check_folder, read_bounded, replace_file
from trainer.runtime.lock import is_locked, lock


@pytest.fixture
def theirs(tmp_path):
    """Returns a folder with ordinary files and internal links, beside a file that no command may read."""
    (tmp_path / "secret").write_text("mine")
    folder = tmp_path / "theirs"
    (folder / "a/b").mkdir(parents=True)
    (folder / "a/b/file").write_text("1")
    (folder / "a/link").symlink_to("b/file")
    (folder / "a/b/up").symlink_to("..")
    return folder


def refusal(folder, *names):
    with pytest.raises(UserError) as caught:
        check_folder(folder, *names)
    return str(caught.value)


def test_files_folders_and_links_within_the_folder_pass(theirs, tmp_path, monkeypatch):
    check_folder(theirs)
    check_folder(theirs, ["a", "absent/file"])
    (tmp_path / "named").symlink_to(theirs)
    check_folder(tmp_path / "named")  # the user named this link
    monkeypatch.chdir(theirs)
    check_folder(theirs.__class__("."))
    check_folder(tmp_path / "absent")


@pytest.mark.parametrize("target", ["../secret", "..", "/dev/zero", "a/b/../../../secret", "a/out", "../gone"])
def test_a_link_out_of_the_folder_is_refused_at_any_depth(theirs, tmp_path, target):
    (theirs / "a/out").symlink_to(tmp_path / "secret")
    for name in ("link", "a/b/link"):
        (theirs / name).symlink_to(theirs / target)
        assert f"{theirs / name} leads out of {theirs}, to " in refusal(theirs, [name])
        (theirs / name).unlink()
    assert f"{theirs / 'a/out'} leads out" in refusal(theirs)
    check_folder(theirs, ["a/b/file"])  # only this file is requested


def test_a_folder_behind_a_link_is_checked_too(theirs, tmp_path):
    outside = tmp_path / "theirs" / "hidden"
    outside.mkdir()
    (outside / "out").symlink_to(tmp_path / "secret")
    (theirs / "a/inside").symlink_to("../hidden")
    assert "leads out of" in refusal(theirs, ["a"])


def test_links_that_lead_nowhere_and_to_themselves(theirs):
    (theirs / "gone").symlink_to("nothing")
    assert f"{theirs / 'gone'} is a link that leads nowhere" in refusal(theirs)
    (theirs / "gone").unlink()
    (theirs / "loop").symlink_to("loop")
    assert "loop" in refusal(theirs)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_is_neither_file_nor_folder_is_refused(theirs, kind, monkeypatch):
    monkeypatch.chdir(theirs)  # the path of a socket must be short
    if kind == "pipe":
        os.mkfifo("it")
    else:
        with socket.socket(socket.AF_UNIX) as it:
            it.bind("it")
    assert f"{theirs / 'it'}: neither a file nor a folder" in refusal(theirs)


@pytest.mark.parametrize("kind", ["models", "datasets", "other"])
def test_a_snapshot_of_hugging_faces_cache(tmp_path, kind):
    cached = tmp_path / f"{kind}--someone--model"
    snapshot = cached / "snapshots/0123abcd"
    for folder in (snapshot, cached / "blobs"):
        folder.mkdir(parents=True)
    (cached / "blobs/77").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/77")
    (snapshot / "checkpoints/3").mkdir(parents=True)
    (snapshot / "checkpoints/3/config.yml").symlink_to("../../../../blobs/77")
    if kind == "other":
        assert "leads out of" in refusal(snapshot)
        return
    check_folder(snapshot)
    check_folder(snapshot / "checkpoints/3")
    (snapshot / "secret").symlink_to(cached / "secret")
    assert "leads out of" in refusal(snapshot)
    (snapshot / "secret").unlink()
    (cached / "blobs").rename(tmp_path / "elsewhere")
    (cached / "blobs").symlink_to(tmp_path / "elsewhere")
    assert "leads out of" in refusal(snapshot)


def test_a_file_is_replaced_and_no_link_is_written_through(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for name in ("page", f"page.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to("mine")
    replace_file(tmp_path / "page", "new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "page").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "page"]
    long = "é" * 127
    replace_file(tmp_path / long, b"x")
    assert (tmp_path / long).read_bytes() == b"x"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_file(tmp_path / "folder", "x")
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("name", "write"), [("tensorboard/events.out.tfevents.trainer", EventsWriter), (".lock", lock)]
)
def test_what_is_appended_goes_through_no_link_and_into_no_pipe(tmp_path, name, write):
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.write_text("")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(mine)
    with pytest.raises((UserError, OSError)):
        write(run)
    assert mine.read_text() == ""
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises((UserError, OSError)):
        write(run)


def test_metrics_go_through_no_link(tmp_path):
    (tmp_path / "mine").write_text('{"step": 0, "loss": 1.0}\n')
    (tmp_path / "metrics.jsonl").symlink_to("mine")
    with MetricsWriter(tmp_path, 1) as metrics:  # replaces an internal link by a copy of its target
        metrics.write({"step": 1})
    assert (tmp_path / "mine").read_text() == '{"step": 0, "loss": 1.0}\n'
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("gone")
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl"):
        MetricsWriter(tmp_path)
    assert not (tmp_path / "gone").exists()


def test_a_file_with_holes_does_not_fill_memory(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="file: more than 268,435,456 bytes"):
        read_bounded(tmp_path / "file")


def test_a_lock_that_is_a_link_within_the_run_is_an_error(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/other").touch()
    (tmp_path / "run/.lock").symlink_to("other")
    with pytest.raises(UserError, match=r"\.lock: cannot be read"):
        expected_run(str(tmp_path), "run", "", True)
    with pytest.raises(UserError, match="cannot write there"):
        open_run(str(tmp_path), "run", "", True, print)


def test_the_lock_of_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    assert not is_locked(tmp_path)


def test_the_report_of_a_run_in_progress_goes_through_no_link(tmp_path):
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.write_text("mine")
    run.mkdir()
    for name in ("report.html", f"report.html.{os.getpid()}.tmp"):
        (run / name).symlink_to(mine)
    ReportFile(run, [], print).write()
    assert mine.read_text() == "mine"
    assert not (run / "report.html").is_symlink()


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "checkpoints", "tensorboard", "finished", ".lock", ".lease", "samples.jsonl"]
)
def test_a_run_is_not_continued_in_a_folder_with_a_link_out_of_it(tmp_path, name):
    (tmp_path / "runs/theirs").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "runs/theirs" / name).symlink_to(tmp_path / "mine")
    for begin in (open_run, expected_run):
        said = () if begin is expected_run else (print,)
        with pytest.raises(UserError, match="leads out of"):
            begin(str(tmp_path / "runs"), "theirs", "", True, *said)
    assert not list((tmp_path / "mine").iterdir())
