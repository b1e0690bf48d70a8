"""Only one process at a time can hold the lock of a folder."""

import subprocess
import sys

from trainer.runtime.lock import lock


def held_by_another(folder):
    code = (
        f"from pathlib import Path; from trainer.runtime.lock import lock; print(lock(Path({str(folder)!r})) is None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {"True": True, "False": False}[done.stdout.strip()]


def test_a_lock_is_held_until_it_is_closed(tmp_path):
    held = lock(tmp_path)
    assert held is not None
    assert lock(tmp_path) is None
    held.close()
    again = lock(tmp_path)
    assert again is not None
    again.close()


def test_another_process_sees_it_and_a_process_that_ended_holds_nothing(tmp_path):
    held = lock(tmp_path)
    assert held_by_another(tmp_path)
    held.close()
    assert not held_by_another(tmp_path)  # the checking process acquires the lock, and releases it when it ends
    assert not held_by_another(tmp_path)
    assert (tmp_path / ".lock").exists()


def test_a_killed_process_holds_nothing(tmp_path):
    code = (
        "import os, signal; from pathlib import Path; from trainer.runtime.lock import lock;"
        f"held = lock(Path({str(tmp_path)!r})); assert held; os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    held = lock(tmp_path)
    assert held is not None
    held.close()


def test_folders_are_locked_by_themselves(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = lock(tmp_path / "a"), lock(tmp_path / "b")
    assert one is not None
    assert other is not None
    one.close()
    other.close()
