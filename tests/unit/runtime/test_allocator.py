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
names = ("LD_PRELOAD", "TBB_MALLOC_USE_HUGE_PAGES", "TRAINER_STARTED_AGAIN")
print(json.dumps([sys.argv[1:], sys.flags.optimize, first == str(os.getpid()), fast, *map(os.environ.get, names)]))
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
    arguments, *rest = json.loads(done.stdout)
    assert arguments == ["a=b c", "--", "d"]
    return rest


@needs_tbb
def test_the_same_process_goes_on_and_hands_nothing_down(tmp_path):
    assert start(tmp_path) == [1, True, True, None, None, None]


@needs_tbb
def test_what_the_user_chose_stays(tmp_path):
    assert start(tmp_path, LD_PRELOAD="") == [1, True, False, "", None, None]
    assert start(tmp_path, TBB_MALLOC_USE_HUGE_PAGES="0") == [1, True, True, None, "0", None]


@needs_tbb
def test_it_starts_again_once_whatever_the_loader_does():
    """Where something in between drops LD_PRELOAD, as a wrapper of Python may."""
    program = """
import os
from trainer.runtime.allocator import start_again_with_fast_allocator
os.execve = lambda *_: print("again")
start_again_with_fast_allocator()
print("went on")
"""
    env = os.environ | {"TRAINER_STARTED_AGAIN": "LD_PRELOAD"}
    env.pop("LD_PRELOAD", None)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "went on\n"


@needs_tbb
def test_the_program_that_compiles_starts_with_it(tmp_path):
    program = """
import os, runpy, sys
os.execve = lambda path, arguments, env: (print("again with", env["LD_PRELOAD"]), sys.exit())
runpy.run_module("trainer.train_compile", run_name="__main__")
"""
    env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"again with {':'.join(allocator._libraries())}\n"


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
    ("platform", "folder", "names", "found"),
    [
        ("linux", "lib", ["libtbbmalloc.so.2", allocator.PROXY], True),
        ("linux", "lib", ["libtbb.so", allocator.PROXY], False),
        ("linux", "a lib", ["libtbbmalloc.so.2", allocator.PROXY], False),
        ("linux", "a:lib", ["libtbbmalloc.so.2", allocator.PROXY], False),
        ("darwin", "lib", ["libtbbmalloc.so.2", allocator.PROXY], False),
    ],
)
def test_only_whole_and_under_paths_that_a_list_can_hold(tmp_path, monkeypatch, platform, folder, names, found):
    monkeypatch.setattr(sys, "platform", platform)
    (tmp_path / folder).mkdir()
    monkeypatch.setattr(metadata, "files", lambda name: files(tmp_path / folder, *names))
    paths = [str(Path(tmp_path, folder, name)) for name in names]
    assert allocator._libraries() == (paths if found else [])


def test_nothing_happens_without_the_package_or_where_it_is_forbidden(monkeypatch):
    def files(name):
        raise metadata.PackageNotFoundError(name)

    def forbidden(*_):
        started.append(True)
        raise PermissionError

    started = []
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(os, "execve", forbidden)
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "files", files)
        allocator.start_again_with_fast_allocator()
    assert started == []
    monkeypatch.setattr(allocator, "_libraries", lambda: ["a", "b"])
    allocator.start_again_with_fast_allocator()
    assert started == [True]


def test_huge_pages_that_are_kept_for_others_are_not_taken(tmp_path, monkeypatch):
    pages = tmp_path / "nr_hugepages"
    monkeypatch.setattr(allocator, "_RESERVED_PAGES", pages)
    monkeypatch.setattr(allocator, "_libraries", lambda: ["a", "b"])
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("TBB_MALLOC_USE_HUGE_PAGES", raising=False)
    asked = []
    monkeypatch.setattr(os, "execve", lambda path, arguments, env: asked.append("TBB_MALLOC_USE_HUGE_PAGES" in env))
    for text in ("0\n", "512\n"):
        pages.write_text(text)
        allocator.start_again_with_fast_allocator()
    assert asked == [True, False]
