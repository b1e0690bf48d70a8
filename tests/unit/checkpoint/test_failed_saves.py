"""Saves that fail, and processes that end during one."""

import errno
import logging
import os
import subprocess
import sys
import textwrap
import types
from concurrent.futures import Future
from pathlib import Path

import jax
import pytest
from manager_cases import SIDECAR, saved, settings, small_tree
from orbax import checkpoint as ocp

from trainer.checkpoint.disk import forget_failures
from trainer.checkpoint.manager import CheckpointManager, inspect, newest
from trainer.checkpoint.sidecar import SidecarFiles
from trainer.config.errors import UserError


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """Returns a folder, and the finished process whose saves in it failed."""
    folder = tmp_path_factory.mktemp("failed")
    program = """
        import resource, signal, sys
        from pathlib import Path
        sys.path.insert(0, "TESTS")
        from trainer.checkpoint.manager import CheckpointManager
        from trainer.config.errors import UserError
        from manager_cases import SIDECAR, saved, settings, small_tree

        for background in (True, False):
            run = Path("FOLDER") / str(background)
            try:
                how = settings(async_checkpointing=background)
                with CheckpointManager(run, how, say=print) as manager:
                    manager.save(1, small_tree(), SIDECAR, {})
                    manager.wait()
                    manager.directory.rename(run / "moved")
                    manager.directory.touch()
                    manager.save(2, small_tree(), SIDECAR, {})
            except UserError as error:
                print("error:", error)
        # A process that may not write files above 1 MB simulates a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        run = Path("FOLDER") / "full"
        saved(run, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            saved(run, 2, small_tree(width=2048))
        except UserError as error:
            print("error:", error)
    """
    for name, value in {"TESTS": Path(__file__).parents[2], "FOLDER": folder}.items():
        program = program.replace(name, str(value))
    words = [sys.executable, "-c", textwrap.dedent(program)]
    return folder, subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ, timeout=120)


def test_a_full_disk_is_one_message_and_the_last_checkpoint_stays(failed):
    folder, done = failed
    here = folder / "full" / "checkpoints"
    assert f"error: cannot write a checkpoint below {here}: File too large; the" in done.stdout
    assert "are intact: free disk space and run the same command again" in done.stdout
    assert done.stderr == ""
    assert newest(folder / "full") == here / "1"
    assert inspect(here / "1") == SIDECAR


def test_a_process_ends_after_a_save_for_which_no_folder_could_be_made(failed):
    """A thread of Orbax that waits for the folder would keep the process alive."""
    folder, done = failed
    for background in (True, False):
        assert f"error: {folder}/{background}/checkpoints was renamed, removed or replaced while" in done.stdout
        assert inspect(folder / f"{background}/moved/1") == SIDECAR
    assert done.stderr == ""


def test_what_fails_after_a_part_of_a_save_failed_prints_nothing(tmp_path, monkeypatch, capfd):
    """Orbax closes the event loop to which TensorStore's threads report."""

    async def write(self, directory):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SidecarFiles, "_write", write)
    with pytest.raises(UserError, match=r"checkpoints: No space left on device; .* free disk space and run the same"):
        saved(tmp_path, tree=small_tree(width=1024))
    sys.unraisablehook(types.SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed")))
    assert capfd.readouterr() == ("", "")
    assert newest(tmp_path) is None


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere")])
def test_checkpoints_is_no_folder(tmp_path, make):
    make(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=f"{tmp_path}/checkpoints is not a folder, but checkpoints are saved below"):
        CheckpointManager(tmp_path, settings(), say=print)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            errno.ENOSPC,
            "No space left on device; free disk space and run the same command again, or set enable_checkpoi",
        ),
        (errno.EROFS, "Read-only file system; make the folder writable and run the same command again, or set"),
        (errno.EIO, "Input/output error; check the disk or its connection and run the same command again, or"),
    ],
)
def test_a_folder_that_takes_no_file_is_told_before_training(tmp_path, monkeypatch, code, message):
    def refused(path, content):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "write_bytes", refused)
    with pytest.raises(UserError, match=f"cannot write checkpoints below {tmp_path}/checkpoints: {message}"):
        CheckpointManager(tmp_path, settings(), say=print)
    monkeypatch.undo()
    lines = []
    with CheckpointManager(tmp_path, settings(), say=lines.append):
        assert lines == []
        assert list((tmp_path / "checkpoints").iterdir()) == [], "neither trial is left"


def test_what_a_killed_trial_left_is_cleared_away(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/trial-0.expired").touch()
    with CheckpointManager(tmp_path, settings(), say=print):
        assert list((tmp_path / "checkpoints").iterdir()) == []


def logged(error, file=ocp.__file__):
    """Logs an error as a thread of Orbax does."""
    logger = logging.getLogger("absl")
    logger.handle(logger.makeRecord("absl", logging.ERROR, file, 1, "", (), (type(error), error, None)))


def test_of_several_processes_the_one_whose_disk_fails_does_not_wait_for_the_others(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        manager._ending = Future()  # never done: the other process waits for this one
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        logged(error)
        with pytest.raises(UserError, match=r"cannot write a checkpoint below .*: No space left on device"):
            manager.wait()


def test_of_several_processes_the_one_whose_checksums_fail_does_not_wait_for_the_others(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, settings(), say=print) as manager, monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        patch.setattr(manager._orbax, "close", lambda: pytest.fail("Orbax waits for the other processes"))
        manager._ending = Future()
        manager._ending.set_exception(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(UserError, match="No space left on device"):
            manager.wait()
        manager.close()


def test_of_several_processes_the_one_whose_save_fails_raises_what_failed(tmp_path, monkeypatch):
    """The error is a bucket's, not a disk error. Other libraries use the same logger and may log their own errors."""
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        manager._ending = Future()
        forget_failures()
        logged(ValueError("other"), "/site/grain/a.py")
        logged(ValueError("no credentials"))
        with pytest.raises(ValueError, match="no credentials"):
            manager.wait()


def test_a_process_that_lost_another_in_a_save_does_not_blame_the_disk(tmp_path, monkeypatch):
    """A TimeoutError is an OSError, but not a disk error."""
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        manager._ending = Future()
        forget_failures()
        error = TimeoutError("Timeout waiting at barrier 'a'.")
        logged(error)
        with pytest.raises(TimeoutError):
            manager.wait()


def test_what_failed_in_a_save_is_raised_before_the_barrier_that_others_missed(tmp_path, monkeypatch):
    def missed(folder):
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out")

    saving = Future()
    saving.set_exception(ValueError("no credentials"))
    with CheckpointManager(tmp_path, settings(), say=print) as manager, monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint.manager.is_first", lambda: False)
        patch.setattr("trainer.checkpoint.manager._sum", missed)
        with pytest.raises(ValueError, match="no credentials"):
            manager._end(saving, 3)


class Endless(Future):
    """A save that never ends; waiting for it ends at a second Ctrl-C."""

    def result(self):
        raise KeyboardInterrupt


def test_ctrl_c_waits_for_the_save_that_runs_and_a_second_one_does_not(tmp_path):
    lines = []

    def interrupted():
        with CheckpointManager(tmp_path, settings(), say=lines.append) as manager:
            manager.save(1, small_tree(), SIDECAR, {})
            manager.wait()
            manager._ending = Endless()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert lines == [
        "interrupted: waiting for the checkpoint of update 1, which is being written; Ctrl-C again ends without it"
    ]


def test_a_folder_that_cannot_be_read_is_not_told_as_one_that_cannot_be_written(tmp_path, monkeypatch):
    saved(tmp_path)

    def refused(path):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("trainer.checkpoint.manager.entries", refused)
    with pytest.raises(
        UserError, match=f"^cannot read the checkpoints below {tmp_path}/checkpoints: Permission denied"
    ):
        CheckpointManager(tmp_path, settings(), say=print)


@pytest.mark.parametrize("error", [None, ValueError("No ArrayMetadata found"), FileNotFoundError(errno.ENOENT, "gone")])
def test_a_run_folder_that_is_renamed_is_said_to_be(tmp_path, error):
    """With error=None, the folder is renamed between two saves. Otherwise it is renamed during a save, which fails with
    an error of Orbax."""
    run = tmp_path / "run"
    with CheckpointManager(run, settings(), say=print) as manager:
        manager.save(1, small_tree(), SIDECAR, {})
        manager.wait()
        run.rename(tmp_path / "other")
        if error is not None:
            manager.directory.mkdir(parents=True)  # as TensorStore does
            manager._ending = Future()
            manager._ending.set_exception(error)
        with pytest.raises(UserError, match=f"^{run}/checkpoints was renamed, removed or replaced while the run wrote"):
            manager.save(2, small_tree(), SIDECAR, {})
    assert inspect(tmp_path / "other/checkpoints/1") == SIDECAR
    assert run.exists() == (error is not None)
