"""Prepared data: what they hold, and what happens where they can not be written or read."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trainer.config.errors import UserError
from trainer.data import cache, open_dataset
from trainer.data.batches import eval_batches
from trainer.data.corpus import read_corpus
from trainer.data.stdlib import Prepared, open_corpus

from .conftest import LENGTH, VOCAB

SCRIPT = """
import json, resource, sys
from pathlib import Path
from trainer.data.stdlib import open_corpus
root, folder, limit = sys.argv[1:]
if limit != "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
lines = []
prepared = open_corpus(Path(root), Path(folder), 300, 32, lines.append)
heavy = [name for name in ("tensorflow", "jax", "grain") if name in sys.modules]
print(json.dumps({"lines": lines, "heavy": heavy, "rows": [prepared.train.size, prepared.evaluation.size]}))
"""


def start(root: Path, folder: Path, limit: int = 0) -> subprocess.Popen:
    command = [sys.executable, "-c", SCRIPT, str(root), str(folder), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def silent(line: str) -> None:
    pass


def documents_of(source, tokenizer) -> list[bytes]:
    """Bytes of each document that the targets of a split spell, in order, and a check that none crosses an end."""
    batch = source.rows(np.arange(source.size))
    real = batch["targets_segmentation"] != 0
    inputs, targets, place = batch["inputs"][real], batch["targets"][real], batch["inputs_position"][real]
    # A target that is not the end of a document is the next input.
    inside = targets[:-1] != tokenizer.eot
    assert (targets[:-1][inside] == inputs[1:][inside]).all()
    assert (inputs[1:][~inside] == tokenizer.eot).all()
    assert inputs[0] == tokenizer.eot
    assert (place[1:][~inside] == 0).all()
    assert (place == 0).sum() > len(place) // LENGTH
    ends = np.flatnonzero(targets == tokenizer.eot)
    assert ends[-1] == len(targets) - 1
    return [tokenizer.decode(part).encode() for part in np.split(targets, ends[:-1] + 1)]


def test_rows_spell_every_file_once_in_order(prepared: Prepared, root: Path):
    files = read_corpus(root)
    for source, held_out in ((prepared.train, False), (prepared.evaluation, True)):
        expected = [(root / file.path).read_bytes() for file in files if file.held_out == held_out]
        assert documents_of(source, prepared.tokenizer) == expected


def test_targets_stand_for_all_bytes_and_meta_counts_them(prepared: Prepared):
    counts = prepared.meta["splits"]
    assert counts["train"]["files"] + counts["validation"]["files"] == 60
    for source, name in ((prepared.train, "train"), (prepared.evaluation, "validation")):
        batches = list(eval_batches(source, 7))
        targets = np.concatenate([b["targets"][b["targets_segmentation"] != 0] for b in batches])
        assert prepared.tokenizer.bytes_per_token[targets].sum() == counts[name]["bytes"]
        assert len(targets) == counts[name]["tokens"]
        assert source.size == counts[name]["rows"]


def test_rows_come_as_they_were_asked_for(prepared: Prepared):
    everything = prepared.train.rows(np.arange(prepared.train.size))
    some = prepared.train.rows(np.array([5, 0, 5]))
    for name, values in some.items():
        assert values.dtype == np.int32
        np.testing.assert_array_equal(values, everything[name][[5, 0, 5]])


def test_two_first_runs_at_once_prepare_once_and_load_neither_tensorflow_nor_jax(root: Path, tmp_path: Path):
    runs = [start(root, tmp_path) for _ in range(2)]
    outputs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    reports = [json.loads(out) for out, _ in outputs]  # nothing else is printed
    assert [error for _, error in outputs] == ["", ""]
    assert reports[0]["rows"] == reports[1]["rows"]
    assert sum(line.startswith("preparing") for report in reports for line in report["lines"]) == 1
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

    first = threading.Thread(target=cache.ensure, args=(folder, build, silent))
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
        cache.ensure(folder, fail, silent)
    assert [path.name for path in tmp_path.iterdir()] == ["data.lock"]
    # Killed, it could not tidy up: the next run does.
    (tmp_path / "data.tmp").mkdir()
    (tmp_path / "data.tmp" / "half").touch()
    cache.ensure(folder, lambda temporary: {"n": 1}, silent)
    assert [path.name for path in folder.iterdir()] == ["meta.json"]
    assert cache.read_meta(folder)["n"] == 1


@pytest.mark.parametrize("limit", [200, 12000], ids=["tokenizer", "rows"])
def test_a_full_disk_is_named(root: Path, tmp_path: Path, limit: int):
    run = start(root, tmp_path, limit)
    error = run.communicate(timeout=60)[1]
    last = error.strip().splitlines()[-1]
    assert "UserError" in last
    assert str(tmp_path) in last
    assert "dataset_path" in last
    assert "File too large" in last
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_can_not_be_written_is_named(root: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/below: Not a directory; set dataset_path"):
        open_corpus(root, tmp_path / "file" / "below", VOCAB, LENGTH, silent)


def edit_meta(change) -> object:
    def edit(path: Path) -> None:
        meta = json.loads(path.read_text())
        change(meta)
        path.write_text(json.dumps(meta))

    return edit


def more_rows(meta: dict) -> None:
    meta["splits"]["train"]["rows"] += 1


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("meta.json", lambda path: path.write_text("{"), "cannot be read"),
        ("meta.json", Path.unlink, "cannot be read"),
        ("meta.json", edit_meta(lambda meta: meta.pop("splits")), "lacks an entry"),
        ("meta.json", edit_meta(more_rows), "rows where there are"),
        ("tokenizer.json", lambda path: path.write_text("{}"), "is not what was written"),
        ("tokenizer.json", Path.unlink, "cannot be read"),
        ("array_record-00000-of-00001", lambda path: path.write_bytes(path.read_bytes()[:-9]), "is not what"),
    ],
)
def test_damage_is_named_with_the_remedy(root: Path, tmp_path: Path, file: str, damage, message: str):
    folder = open_corpus(root, tmp_path, VOCAB, LENGTH, silent).folder
    path = next(path for path in sorted(folder.rglob("*")) if path.name.endswith(file))
    damage(path)
    with pytest.raises(UserError) as caught:
        open_corpus(root, tmp_path, VOCAB, LENGTH, silent)
    assert all(part in str(caught.value) for part in (str(path), message, f"delete {folder}"))


def test_other_settings_and_other_files_are_prepared_anew(root: Path, tmp_path: Path):
    (tmp_path / "corpus").mkdir()
    for file in root.rglob("*.py"):
        (tmp_path / "corpus" / file.name).write_bytes(file.read_bytes())
    args = tmp_path / "corpus", tmp_path / "cache"
    folders = [open_corpus(*args, v, n, silent).folder for v, n in ((VOCAB, LENGTH), (VOCAB + 1, LENGTH), (VOCAB, 16))]
    (tmp_path / "corpus" / "module1.py").write_text("changed = 1\n")
    folders.append(open_corpus(*args, VOCAB, LENGTH, silent).folder)
    assert len(set(folders)) == 4


def test_a_small_vocabulary_is_refused_with_the_minimum(root: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"vocab_size=256: .* at least 257"):
        open_corpus(root, tmp_path, 256, LENGTH, silent)
    assert open_corpus(root, tmp_path, 257, LENGTH, silent).tokenizer.vocab_size == 257


def test_a_corpus_too_small_to_split_is_refused(tmp_path: Path):
    (tmp_path / "os.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="1 to train on and 0 held out"):
        open_corpus(tmp_path, tmp_path / "cache", VOCAB, LENGTH, silent)


def test_the_cache_folder_follows_dataset_path_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.cache_root("") == tmp_path / ".cache" / "trainer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_root("") == tmp_path / "xdg" / "trainer"
    assert cache.cache_root("~/data") == tmp_path / "data"


def config(**changes) -> SimpleNamespace:
    keys = {"dataset_path": "", "max_target_length": LENGTH, "vocab_size": VOCAB, "data_shuffle_seed": 0}
    return SimpleNamespace(**keys | changes)


def test_open_dataset_stdlib(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.data.corpus.stdlib_folder", lambda: root)
    dataset = open_dataset(config(dataset_type="stdlib", dataset_path=str(tmp_path)), silent)
    assert dataset.tokenizer is not None
    assert dataset.train.length == dataset.evaluation.length == LENGTH
    assert dataset.summary["train"]["rows"] == dataset.train.size
    assert dataset.summary["folder"].startswith(str(tmp_path))


def test_open_dataset_synthetic():
    dataset = open_dataset(config(dataset_type="synthetic"), silent)
    assert dataset.tokenizer is None
    assert dataset.train.size is None
    first, *_, last = eval_batches(dataset.evaluation, 100)
    assert first["inputs"].shape == last["inputs"].shape == (100, LENGTH)
    assert (first["inputs"][0] != dataset.train.rows(np.arange(1))["inputs"][0]).any()
