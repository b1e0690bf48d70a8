"""Failures while preparing data: two processes at once, a process that dies, a full disk, damage."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from sample_data import LENGTH, VOCAB, opened, say_nothing

from trainer.config.errors import UserError
from trainer.data import cache, rows
from trainer.data.dataset import Dataset
from trainer.data.documents import Location
from trainer.data.packing import Origin, Packed, Resume

SCRIPT = """
import json, resource, sys
from trainer.config.load import load
from trainer.data import stdlib
from trainer.data.dataset import open_dataset
from pathlib import Path
limit, root, *words = sys.argv[1:]
if limit != "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
stdlib.stdlib_folder = lambda: Path(root)
lines = []
dataset = open_dataset(load(words).config, lines.append)
batch, position = next(dataset.train_stream(rows=2))
heavy = [name for name in ("tensorflow", "jax", "grain", "datasets", "sentencepiece") if name in sys.modules]
print(json.dumps({"lines": lines, "heavy": heavy, "rows": dataset.evaluation.size}))
"""


def start(root: Path, folder: Path, limit: int = 0) -> subprocess.Popen:
    words = [f"data_cache_directory={folder}", f"vocab_size={VOCAB}", f"max_target_length={LENGTH}"]
    command = [sys.executable, "-c", SCRIPT, str(limit), str(root), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def stdlib(root: Path, monkeypatch: pytest.MonkeyPatch):
    """stdlib(folder, **keys): returns the dataset of the generated corpus, prepared in that folder."""
    monkeypatch.setattr("trainer.data.stdlib.stdlib_folder", lambda: root)

    def made(folder: Path, **keys) -> Dataset:
        return opened(folder, **{"dataset_type": "stdlib", "eval_interval": 1} | keys)

    return made


def test_two_first_runs_at_once_prepare_once_and_load_nothing_heavy(root: Path, tmp_path: Path):
    runs = [start(root, tmp_path) for _ in range(2)]
    outputs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    reports = [json.loads(out) for out, _ in outputs]  # there is no other output
    assert [error for _, error in outputs] == ["", ""]
    assert reports[0]["rows"] == reports[1]["rows"]
    lines = [line for report in reports for line in report["lines"]]
    for beginning, times in (("training a BPE", 1), ("tokenizing and packing", 2), ("prepared", 2)):
        assert sum(line.startswith(beginning) for line in lines) == times
    assert reports[0]["heavy"] == reports[1]["heavy"] == []
    assert not list(tmp_path.glob("*.tmp"))


def test_a_second_run_waits_and_says_so(tmp_path: Path):
    folder, started, finish, lines = tmp_path / "data", threading.Event(), threading.Event(), []

    def build(temporary: Path) -> dict:
        started.set()
        assert finish.wait(timeout=10)
        (temporary / "file").write_text("whole")
        return {}

    def wait(line: str) -> None:
        lines.append(line)
        assert not folder.exists()
        finish.set()

    first = threading.Thread(target=cache.ensure, args=(folder, build, say_nothing))
    first.start()
    assert started.wait(timeout=10)
    cache.ensure(folder, lambda temporary: pytest.fail("prepared twice"), wait)
    first.join()
    assert len(lines) == 1
    assert f"another run is preparing {folder}" in lines[0]
    assert (folder / "file").read_text() == "whole"


def test_a_run_that_dies_leaves_no_half_cache(tmp_path: Path):
    folder = tmp_path / "data"

    def fail(temporary: Path) -> dict:
        (temporary / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.ensure(folder, fail, say_nothing)
    assert [path.name for path in tmp_path.iterdir()] == ["data.lock"]
    # A killed process could not clean up, so the next run does.
    (tmp_path / "data.tmp").mkdir()
    (tmp_path / "data.tmp" / "half").touch()
    cache.ensure(folder, lambda temporary: {"n": 1}, say_nothing)
    assert [path.name for path in folder.iterdir()] == ["meta.json"]
    assert cache.read_meta(folder)["n"] == 1


@pytest.mark.parametrize("limit", [200, 12000], ids=["tokenizer", "rows"])
def test_a_full_disk_is_named(root: Path, tmp_path: Path, limit: int):
    run = start(root, tmp_path, limit)
    error = run.communicate(timeout=60)[1]
    last = error.strip().splitlines()[-1]
    assert "UserError" in last
    assert str(tmp_path) in last
    assert "data_cache_directory" in last
    assert "File too large" in last
    # Only complete folders remain.
    assert all(path.suffix == ".lock" or (path / "meta.json").is_file() for path in tmp_path.iterdir())


def test_a_folder_that_can_not_be_written_is_named(stdlib, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/below: Not a directory; set data_cache_directory"):
        stdlib(tmp_path / "file" / "below")


def edit_meta(change) -> object:
    def edit(path: Path) -> None:
        meta = json.loads(path.read_text())
        change(meta)
        path.write_text(json.dumps(meta))

    return edit


@pytest.mark.parametrize(
    ("folder", "file", "damage", "message"),
    [
        ("train", "meta.json", lambda path: path.write_text("{"), "cannot be read"),
        ("train", "meta.json", Path.unlink, "cannot be read"),
        ("train", "meta.json", edit_meta(lambda meta: meta.pop("rows")), "lacks an entry"),
        ("train", "meta.json", edit_meta(lambda meta: meta.update(rows=7)), "rows, but there are"),
        ("bpe", "tokenizer.json", lambda path: path.write_text("{}"), "has changed since it was written"),
        ("bpe", "tokenizer.json", Path.unlink, "cannot be read"),
        (
            "held-out",
            "rows.npy",
            lambda path: path.write_bytes(path.read_bytes()[:-9]),
            "has changed",
        ),
    ],
)
@pytest.mark.parametrize("hashed", [1 << 30, 0])
def test_damage_is_named_with_the_remedy(
    stdlib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, file: str, damage, message: str, hashed: int
):
    """Even if the files are so large that only their sizes are compared."""
    monkeypatch.setattr(cache, "HASHED", hashed)
    stdlib(tmp_path)
    (kept,) = (path for path in tmp_path.glob(f"{folder}-*") if path.is_dir())
    (path,) = (path for path in kept.rglob("*") if path.name.endswith(file))
    damage(path)
    with pytest.raises(UserError) as caught:
        stdlib(tmp_path)
    assert all(part in str(caught.value) for part in (str(path), message, f"delete {kept}"))


def ones(length: int) -> Packed:
    row = dict.fromkeys(("inputs", "targets", "segmentation", "loss"), np.ones(length, int))
    return Packed(row, Resume(None, 0, 0), [Origin(Location("a"), 0)])


@pytest.mark.parametrize(
    ("old", "new"), [(b"NUMPY", b"MUMPY"), (b"'shape': (2", b"'shape': (9"), (b"'shape'", b"'shaqe'")]
)
def test_a_damaged_header_of_rows_is_named(tmp_path: Path, old: bytes, new: bytes):
    """The files are so large that only their sizes are compared, so the damaged header is read."""
    rows.write(tmp_path, [ones(8)] * 2, length=8, vocab_size=9, masked=False)
    content = (tmp_path / "rows.npy").read_bytes()
    assert content.count(old) == 1
    (tmp_path / "rows.npy").write_bytes(content.replace(old, new))
    with pytest.raises(UserError, match=r"rows\.npy cannot be read .*delete"):
        rows.StoredRows([(tmp_path, 2)])


def test_a_damaged_row_is_named_when_it_is_read(tmp_path: Path):
    """The files are so large that only their sizes are compared."""
    rows.write(tmp_path, [ones(8)] * 3, length=8, vocab_size=9, masked=True)
    content = bytearray((tmp_path / "rows.npy").read_bytes())
    content[-1] ^= 1
    (tmp_path / "rows.npy").write_bytes(content)
    source = rows.StoredRows([(tmp_path, 3)])
    assert source.rows(np.arange(2))["inputs"].shape == (2, 8)
    with pytest.raises(UserError, match=r"rows\.npy is damaged: row 2 does not match its checksum; delete"):
        source.rows(np.array([0, 2]))
