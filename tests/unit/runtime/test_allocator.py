"""A process that starts itself again with another allocator."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from trainer.runtime import allocator

SCRIPT = """
import json, os, pathlib, sys
first = os.environ.setdefault("FIRST_PID", str(os.getpid()))
from trainer.runtime.allocator import PROXY, start_again_with_fast_allocator
start_again_with_fast_allocator()
fast = PROXY in pathlib.Path("/proc/self/maps").read_text()
print(json.dumps([sys.argv[1:], sys.flags.optimize, first == str(os.getpid()), fast, os.environ.get("LD_PRELOAD")]))
"""
needs_tbb = pytest.mark.skipif(
    not (sys.platform == "linux" and any(metadata.distributions(name="tbb"))),
    reason="there is no tbb but for Linux on x86-64",
)


def start(folder, **env):
    script = folder / "a script.py"
    script.write_text(SCRIPT)
    before = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    command = [sys.executable, "-O", str(script), "a=b c", "--", "d"]
    done = subprocess.run(command, env=before | env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@needs_tbb
def test_the_same_process_goes_on_with_its_arguments(tmp_path):
    assert start(tmp_path) == [["a=b c", "--", "d"], 1, True, True, None]


@needs_tbb
def test_an_allocator_of_the_users_choice_stays(tmp_path):
    assert start(tmp_path, LD_PRELOAD="") == [["a=b c", "--", "d"], 1, True, False, ""]


def files(folder, *names):
    """What `metadata.files` gives of a package whose libraries lie in `folder`."""
    found = []
    for name in names:
        file = metadata.PackagePath(name)
        file.dist = metadata.PathDistribution(folder / "package.dist-info")
        (folder / name).touch()
        found.append(file)
    return found


@pytest.mark.parametrize(
    ("folder", "names", "found"),
    [
        ("lib", ["libtbbmalloc.so.2", allocator.PROXY], True),
        ("lib", ["libtbb.so", allocator.PROXY], False),
        ("a lib", ["libtbbmalloc.so.2", allocator.PROXY], False),
        ("a:lib", ["libtbbmalloc.so.2", allocator.PROXY], False),
    ],
)
def test_only_whole_and_under_paths_that_a_list_can_hold(tmp_path, monkeypatch, folder, names, found):
    monkeypatch.setattr(sys, "platform", "linux")
    (tmp_path / folder).mkdir()
    monkeypatch.setattr(metadata, "files", lambda name: files(tmp_path / folder, *names))
    paths = [str(Path(tmp_path, folder, name)) for name in names]
    assert allocator._libraries() == (paths if found else [])


def test_without_the_package_nothing_happens(monkeypatch):
    def files(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", files)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started again"))
    allocator.start_again_with_fast_allocator()
    monkeypatch.setattr(sys, "platform", "darwin")
    allocator.start_again_with_fast_allocator()
