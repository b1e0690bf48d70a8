"""Data files on a web server: the same rows as of local files, few bytes, bounded copies, and changes."""

import itertools
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from remote_cases import COPIED, KINDS, copies, keys_of, parts_of, read
from sample_data import config_of, opened, write_corpus
from slow_server import FAULTS, SlowServer
from stream_cases import WAYS, assert_same, batches

from trainer.config.errors import UserError
from trainer.data import corpus as corpora_of_files
from trainer.data.sources import open_source
from trainer.runtime import attempts
from trainer.runtime.remote import data_files


@pytest.mark.rest(covered_by="the two ways of reading", cases=("jsonl.gz", "text", "tfrecord", "arrayrecord"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_records_through_all_faults(
    server: SlowServer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    monkeypatch.setattr(attempts, "SECONDS", 0.3)
    monkeypatch.setattr(attempts, "TRIES", 20)  # a busy machine may be late without a fault, too
    local = parts_of(tmp_path, kind, f"{root}/{kind}/*")
    server.delay = 0.005
    server.fail(itertools.islice(itertools.cycle([*FAULTS, "", ""]), 12))
    parts = parts_of(tmp_path, kind, f"{server.url}/{kind}/*.{kind}")
    assert [str(part.path) for part in parts] == [f"{server.url}/{kind}/{j}.{kind}" for j in range(2)]
    for part, other in zip(pickle.loads(pickle.dumps(parts)), local, strict=True):
        whole = read(other)
        assert read(part) == whole
        cursor, _, _ = whole[len(whole) // 2]
        assert [values for *_, values in read(part, cursor)] == [values for *_, values in whole[len(whole) // 2 + 1 :]]
    assert not [None for fault in itertools.islice(server.faults, 4) if fault]  # every fault occurred


@pytest.mark.parametrize("kind", KINDS)
def test_few_more_bytes_are_sent_than_the_rows_have(server: SlowServer, root: Path, tmp_path: Path, kind: str):
    needed = sum(path.stat().st_size for path in (root / kind).iterdir())
    if kind == "parquet":
        import pyarrow.parquet

        files = [pyarrow.parquet.ParquetFile(path).metadata for path in (root / kind).iterdir()]
        sizes = [file.row_group(i).column(0).total_compressed_size for file in files for i in range(4)]
        assert sum(sizes) < 0.8 * needed
        needed = sum(sizes)
    for part in parts_of(tmp_path, kind, f"{server.url}/{kind}/*"):
        read(part)
    assert needed <= server.sent <= 1.1 * needed
    again = server.sent
    for part in parts_of(tmp_path, kind, f"{server.url}/{kind}/*"):
        read(part)
    assert server.sent - again <= (100 if kind in COPIED else 1.1 * needed)


@pytest.mark.parametrize("kind", ["jsonl", "tfrecord", "parquet"])
def test_a_resume_requests_only_what_follows(server: SlowServer, tmp_path: Path, kind: str):
    part = parts_of(tmp_path, kind, f"{server.url}/{kind}/0.{kind}")[0]
    records = list(part.read())
    server.sent = 0
    assert len(list(part.read(records[-30][0]))) == 29
    assert server.sent < 0.3 * part.weight


def test_reading_some_records_requests_a_block_ahead(server: SlowServer, tmp_path: Path):
    (part, _) = parts_of(tmp_path, "jsonl", f"{server.url}/jsonl/*")
    list(itertools.islice(part.read(), 2))
    time.sleep(0.1)
    assert server.sent < 0.25 * part.weight


def test_reading_a_range_requests_little_after_its_end(server: SlowServer, root: Path, tmp_path: Path):
    (file,) = data_files(f"{server.url}/jsonl/0.jsonl", copies(tmp_path))
    data = (root / "jsonl" / "0.jsonl").read_bytes()
    with file.open(stop=50_000) as there:
        there.seek(20_000)
        assert there.read(30_000) == data[20_000:50_000]
        time.sleep(0.05)
        assert server.sent == 30_000
        assert there.readline() == data[50_000 : data.index(b"\n", 50_000) + 1]
    assert server.sent <= 30_000 + (1 << 12)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_pieces_of_files_are_requested_once(server: SlowServer, root: Path, tmp_path: Path, kind: str):
    source = open_source(config_of(tmp_path, **keys_of(kind, f"{server.url}/{kind}/*")))
    (corpus,), size = source.train, sum(path.stat().st_size for path in (root / kind).iterdir())
    pieces = [*corpus.pieces(size // 4)]
    assert len(pieces) == 4
    records = [record.values for piece in pieces for record in corpus.records(pieces=[piece])]
    assert records == [record.values for record in corpus.records()]
    assert server.sent <= 2 * 1.1 * size


def test_small_text_files_are_requested_together(own: SlowServer, tmp_path: Path):
    folder = write_corpus(own.root / "a", "text", 48)
    (corpus,) = open_source(config_of(tmp_path, **keys_of("text", f"{own.url}/a/*.text"))).train
    own.delay, started = 0.1, time.monotonic()
    texts = [record.values[0] for record in corpus.records()]
    assert time.monotonic() - started < 3  # one after the other, they would take 4.8 s
    assert texts == [path.read_bytes() for path in sorted(folder.iterdir())]
    assert own.sent == sum(map(len, texts))


def test_row_groups_are_requested_one_after_the_other(server: SlowServer, tmp_path: Path):
    columns = {"train_data_columns": "[text,more]"}
    (part,) = parts_of(tmp_path, "parquet", f"{server.url}/parquet/0.parquet", **columns)
    next(part.read())
    time.sleep(0.1)
    assert server.sent < 0.6 * part.weight  # a batch comes from two of the four groups


@pytest.mark.parametrize("kind", ["jsonl", "arrayrecord"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_and_positions_are_those_of_local_files(own: SlowServer, tmp_path: Path, kind: str, way: str):
    folder = write_corpus(own.root / "a", kind)
    own.fail(FAULTS)
    keys = keys_of(kind, f"{folder}/*", data_pipeline=way)
    if way == "prepared":
        keys |= {"prepare_part_mib": 0.0005, "prepare_workers": 1}
    local = opened(tmp_path / "cache", **keys)
    there = opened(tmp_path / "cache", **keys | {"grain_train_files": f"{own.url}/a/*.{kind}"})
    left, right = batches(local, 12), batches(there, 12)
    for (batch, _), (other, _) in zip(left, right, strict=True):
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])
    assert local.fingerprint != there.fingerprint
    assert_same(right[7:], batches(there, 5, right[6][1]))


def test_a_part_is_read_in_another_process(server: SlowServer, tmp_path: Path):
    part = parts_of(tmp_path, "jsonl", f"{server.url}/jsonl/0.jsonl")[0]
    program = "import pickle, sys; print(len(list(pickle.load(sys.stdin.buffer).read())))"
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(part), capture_output=True, check=True)
    assert done.stdout == b"150\n"


def test_copies_stay_under_the_bound(own: SlowServer, tmp_path: Path):
    write_corpus(own.root / "a", "arrayrecord", 60, files=4)
    size = max(path.stat().st_size for path in (own.root / "a").iterdir())
    keys = {"data_cache_directory": tmp_path / "cache", "remote_copies_gib": 2.5 * size / 2**30}
    lines: list[str] = []
    total = sum(path.stat().st_size for path in (own.root / "a").iterdir())
    config = config_of(tmp_path / "cache", **keys_of("arrayrecord", f"{own.url}/a/*"), **keys)
    (corpus,) = open_source(config, lines.append).train
    assert len(lines) == 1
    assert lines[0].startswith(f"4 remote files with {total / 1e6:.2f} MB cannot be read by ranges")
    assert str(tmp_path / "cache" / "copies") in lines[0]
    count = 0
    for _ in corpus.records():
        count += 1
        there = [path for path in (tmp_path / "cache" / "copies").rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in there) <= 2.5 * size
    assert count == 60
    assert {path.name for path in there if path.suffix} == {"2.arrayrecord", "3.arrayrecord"}
    for part in corpus.parts[:2]:
        assert part[0]  # the part keeps its copy
    with pytest.raises(UserError, match=r"being read take .* raise remote_copies_gib"):
        corpus.parts[2][0]


@pytest.mark.parametrize(
    ("bound", "way", "problem"),
    [
        (0, "prepared", "may take 0.00 MB; raise remote_copies_gib"),
        (1.5, "streaming", "needed at the same time, but copies may take at most .*data_pipeline=prepared"),
    ],
)
def test_copies_that_do_not_fit_are_refused_before_reading(
    own: SlowServer, tmp_path: Path, bound: float, way: str, problem: str
):
    folder = write_corpus(own.root / "a", "arrayrecord")
    gib = bound * max(path.stat().st_size for path in folder.iterdir()) / 2**30
    with pytest.raises(UserError, match=problem):
        parts_of(tmp_path, "arrayrecord", f"{own.url}/a/*", remote_copies_gib=gib, data_pipeline=way)
    assert own.sent == 0


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tfrecord", "arrayrecord"])
def test_a_changed_file_is_one_error(own: SlowServer, root: Path, tmp_path: Path, kind: str, marks: bool):
    own.marks = marks
    path = own.root / f"a.{kind}"
    shutil.copy(root / kind / f"0.{kind}", path)
    part = parts_of(tmp_path, kind, f"{own.url}/a.{kind}")[0]
    data = path.read_bytes()
    path.write_bytes(data + b"x" if not marks else data[:-1] + b"x")
    what = "ETag" if marks else f"size {len(data)} -> {len(data) + 1}"
    with pytest.raises(UserError, match=f"a.{kind} changed while it was read: {what}"):
        list(part.read())


def test_a_changed_file_of_one_block_is_found_by_its_size(own: SlowServer, tmp_path: Path):
    own.marks = False
    (own.root / "a.jsonl").write_text('{"text": "a"}\n')
    (part,) = parts_of(tmp_path, "jsonl", f"{own.url}/a.jsonl")
    (own.root / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(UserError, match="changed while it was read: size 14 -> 28"):
        list(part.read())


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_change_in_the_middle_is_found(own: SlowServer, root: Path, tmp_path: Path, kind: str):
    path = own.root / f"a.{kind}"
    shutil.copy(root / kind / f"0.{kind}", path)
    part = parts_of(tmp_path, kind, f"{own.url}/a.{kind}")[0]
    records = part.read()
    next(records)
    path.write_bytes(path.read_bytes().replace(b" 1", b" 2"))
    with pytest.raises(UserError, match="changed while it was read: ETag"):
        list(records)


def test_a_file_system_without_http(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """fsspec's in-memory files have a creation time, but no ETag or checksum."""
    memory = fsspec.filesystem("memory")
    monkeypatch.setitem(attempts.EXTRAS, "memory", "gcs")
    memory.pipe_file("/bucket/b.jsonl", b'{"text": "b"}\n' * 3000)
    memory.pipe_file("/bucket/a.jsonl", b'{"text": "a"}\n')
    files = data_files("memory://bucket/*.jsonl", copies(tmp_path))
    assert [str(file) for file in files] == ["memory://bucket/a.jsonl", "memory://bucket/b.jsonl"]
    with files[1].open() as file:
        assert file.read(14) == b'{"text": "b"}\n'
        memory.pipe_file("/bucket/b.jsonl", b'{"text": "c"}\n' * 3000)
        with pytest.raises(UserError, match="changed while it was read: created"):
            file.read()
    memory.pipe_file("/bucket/c.parquet", (root / "parquet" / "0.parquet").read_bytes())
    (part,) = parts_of(tmp_path, "parquet", "memory://bucket/c.parquet")
    records = part.read()
    next(records)
    memory.pipe_file("/bucket/c.parquet", (root / "parquet" / "0.parquet").read_bytes())
    with pytest.raises(UserError, match="changed while it was read: created"):
        list(records)
    memory.rm("/bucket", recursive=True)


def test_the_fingerprint_is_that_of_the_content(own: SlowServer, tmp_path: Path):
    def fingerprint(query: str = "") -> str:
        own.sent = 0
        return corpora_of_files.file_fingerprint(data_files(f"{own.url}/a.jsonl{query}", copies(tmp_path)))

    path = own.root / "a.jsonl"
    path.write_bytes(bytes(1 << 18))
    first = fingerprint()
    assert own.sent == 0
    assert fingerprint("?signature=1") == first
    path.write_bytes(bytes(1 << 17) + b"x" + bytes((1 << 17) - 1))
    assert fingerprint() != first
    own.marks = False
    first = fingerprint()
    assert own.sent == 1 << 17  # both ends of the file
    path.write_bytes(bytes((1 << 18) - 1) + b"x")
    assert fingerprint() != first
