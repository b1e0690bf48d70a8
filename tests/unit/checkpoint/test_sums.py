"""Checksums of a checkpoint's files, shared between processes. Threads simulate the processes."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer.checkpoint import sums
from trainer.config.errors import UserError

FILES = {
    "_CHECKPOINT_METADATA": b"{}",
    "state/_METADATA": b"{}",
    "state/manifest.ocdbt": b"joined",
    "state/ocdbt.process_0/d/a": b"one" * 1000,
    "state/ocdbt.process_1/d/b": b"two" * 900,
    "state/ocdbt.process_1/manifest.ocdbt": b"2",
    "state/ocdbt.process_2/d/c": b"three" * 10,
    "state/ocdbt.process_2/d/empty": b"",
    "run/data-1.json": b"[]",
}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def as_processes(fn, count):
    """Calls fn(process, processes, meet) in `count` threads, each as one of `count` processes."""
    barrier = threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda i: fn(i, count, lambda place: barrier.wait(60)), range(count)))


def summed(folder, count):
    as_processes(lambda *several: sums.write_sums(folder, *several), count)
    return json.loads((folder / "sums.json").read_text())


def read_by(monkeypatch, fn):
    """Returns the files that `fn` reads, once for each read."""
    read, crc = [], sums._crc
    with monkeypatch.context() as patch:
        patch.setattr(sums, "_crc", lambda path: read.append(path) or crc(path))
        fn()
    return read


@pytest.mark.parametrize("count", [2, 3, 4])
def test_several_processes_make_the_sums_of_one_and_each_reads_its_own_files(folder, monkeypatch, count):
    alone = summed(folder, 1)
    assert alone.keys() == FILES.keys() - {"_CHECKPOINT_METADATA"}
    read = read_by(monkeypatch, lambda: summed(folder, count))
    assert len(read) == len(set(read)) == len(alone)
    assert json.loads((folder / "sums.json").read_text()) == alone
    assert not list(folder.glob("sums-*")), "the parts are joined"
    (folder / "sums.json").unlink()
    own = read_by(monkeypatch, lambda: sums.write_sums(folder, 1, 9))
    assert set(own) == {folder / name for name in FILES if "ocdbt.process_1/" in name}


def test_a_file_without_a_checksum_is_damage(folder):
    """A file that sums.json lacks cannot be verified. Extra files of a file system are not read, so they need no
    checksum."""
    whole = summed(folder, 1)
    for name in (
        "commit_success.txt",
        ".DS_Store",
        "Thumbs.db",
        "state/.nfs0001",
    ):  # the first one is written by Orbax, in a bucket
        (folder / name).write_text("")
    sums.verify(folder)
    for kept in ({}, *({name: it for name, it in whole.items() if name != left} for left in whole)):
        (folder / "sums.json").write_text(json.dumps(kept))
        missing = min(whole.keys() - kept.keys())
        with pytest.raises(UserError, match=rf"checkpoint .*: {missing} has no checksum in sums\.json"):
            sums.verify(folder)
    (folder / "sums.json").write_text(json.dumps(whole))
    (folder / "state/more").write_text("")
    with pytest.raises(UserError, match=r"state/more has no checksum"):
        sums.verify(folder)


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_each_file_is_verified_once_and_damage_to_any_is_found_by_one(folder, monkeypatch, count):
    summed(folder, 2)

    def verified():
        for i in range(count):
            sums.verify(folder, i, count)

    read = read_by(monkeypatch, verified)
    assert sorted(read) == sorted(folder / name for name in FILES if name != "_CHECKPOINT_METADATA")
    for name, content in FILES.items():
        changes = (content[1:], content + b"x", None, *([bytes([content[0] ^ 1]) + content[1:]] if content else []))
        for change in changes if name != "_CHECKPOINT_METADATA" else (None, b"{"):
            (folder / name).unlink() if change is None else (folder / name).write_bytes(change)
            problems = []
            for i in range(count):
                try:
                    sums.verify(folder, i, count)
                except UserError as error:
                    problems.append(str(error))
            if change != content:
                assert problems
                assert all(f"is damaged: {name} " in problem for problem in problems)
                assert name == "_CHECKPOINT_METADATA" or len(problems) == 1
        (folder / name).write_bytes(content)


def test_a_failing_read_ends_the_sums(folder, monkeypatch):
    def fails(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sums, "_crc", fails)
    with pytest.raises(OSError, match="Input/output error"):
        sums.write_sums(folder)
    assert not (folder / "sums.json").exists()


def test_processes_meet_wherever_each_mounts_the_disk(tmp_path):
    places = []
    for mount in ("a", "b"):
        folder = tmp_path / mount / "run/checkpoints/3"
        folder.mkdir(parents=True)
        places.append([])
        sums.write_sums(folder, meet=places[-1].append)
    assert places[0] == places[1] == ["run/checkpoints/3 is written", "run/checkpoints/3 is summed"]
