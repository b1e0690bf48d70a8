"""Data files on a web server: the same rows as of local files, few bytes, bounded copies, and errors in one message."""

import gzip
import http.server
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from megatron_files import documents_of, write_indexed
from sample_data import config_of, opened, say_nothing, write_corpus, write_records, write_tfds
from slow_server import FAULTS, SlowServer, served
from stream_cases import WAYS, assert_same, batches

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.data import corpus as corpora_of_files
from trainer.data.dataset import open_dataset
from trainer.data.sources import open_source
from trainer.runtime import attempts, remote
from trainer.runtime.copies import Copies
from trainer.runtime.remote import RemoteFile, data_files

KINDS = ("jsonl", "jsonl.gz", "text", "tfrecord", "parquet", "arrayrecord")
COPIED = ("jsonl.gz", "arrayrecord")
ROWS = [
    {"text": f"{i} " + "".join(f"{i * k * k % 9973} " for k in range(60 + i % 90)), "more": f"{i % 7} " * 100}
    for i in range(300)
]
KEYS = {"dataset_type": "grain", "tokenizer_type": "bytes", "held_out_share": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, short waits and few attempts."""
    monkeypatch.setattr(remote, "_FIRST", 1 << 12)
    monkeypatch.setattr(remote, "_BLOCK", 1 << 14)
    monkeypatch.setattr(attempts, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(attempts, "TRIES", 5)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ROWS in two files of each format."""
    root = tmp_path_factory.mktemp("served")
    for kind in KINDS:
        (root / kind).mkdir()
        for j in range(2):
            path, rows = root / kind / f"{j}.{kind}", ROWS[j::2]
            if kind == "text":
                path.write_text("\n".join(row["text"] for row in rows))
            elif kind == "parquet":
                import pyarrow
                import pyarrow.parquet

                table = pyarrow.Table.from_pylist(rows * 4)
                pyarrow.parquet.write_table(table, path, row_group_size=150, compression="none", use_dictionary=False)
            else:
                write_records(path, kind.removesuffix(".gz"), rows)
            if kind.endswith(".gz"):
                path.write_bytes(gzip.compress(path.read_bytes()))
    return root


@pytest.fixture
def server(root: Path) -> Iterator[SlowServer]:
    with served(root) as server:
        yield server


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SlowServer]:
    """A server of a folder that the test may change."""
    (tmp_path / "own").mkdir()
    with served(tmp_path / "own") as server:
        yield server


def keys_of(kind: str, files: Any, **more: Any) -> dict[str, Any]:
    return KEYS | {"grain_file_type": kind.removesuffix(".gz"), "grain_train_files": files} | more


def parts_of(cache: Path, kind: str, files: Any, **more: Any) -> list[Any]:
    (corpus,) = open_source(config_of(cache, **keys_of(kind, files, **more))).train
    return list(corpus.parts)


def read(part: Any, cursor: int = 0) -> list[tuple[int, float, tuple]]:
    return [(at, share, record.values) for at, share, record in part.read(cursor)]


def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path / "copies", 1 << 30)


@pytest.mark.rest(covered_by="the two ways of reading", cases=("jsonl.gz", "text", "tfrecord", "arrayrecord"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_records_through_all_faults(
    server: SlowServer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    monkeypatch.setattr(attempts, "SECONDS", 0.3)
    monkeypatch.setattr(attempts, "TRIES", 20)  # a busy machine may be late, too
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
    assert not [None for fault in itertools.islice(server.faults, 4) if fault]  # all faults were met


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
    assert time.monotonic() - started < 3  # one after the other, 4.8
    assert texts == [path.read_bytes() for path in sorted(folder.iterdir())]
    assert own.sent == sum(map(len, texts))


def test_row_groups_are_requested_one_after_the_other(server: SlowServer, tmp_path: Path):
    columns = {"train_data_columns": "[text,more]"}
    (part,) = parts_of(tmp_path, "parquet", f"{server.url}/parquet/0.parquet", **columns)
    next(part.read())
    time.sleep(0.1)
    assert server.sent < 0.6 * part.weight  # a batch is of two of four groups


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
        assert part[0]  # held by its part
    with pytest.raises(UserError, match=r"being read take .* raise remote_copies_gib"):
        corpus.parts[2][0]


@pytest.mark.parametrize(
    ("bound", "way", "problem"),
    [
        (0, "prepared", "may take 0.00 MB; raise remote_copies_gib"),
        (1.5, "streaming", "read in any order, but copies may take .*data_pipeline=prepared"),
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
    """fsspec's files in memory have a time of creation, and no mark of their content."""
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
    assert own.sent == 1 << 17  # both ends
    path.write_bytes(bytes((1 << 18) - 1) + b"x")
    assert fingerprint() != first


@pytest.mark.parametrize(
    ("status", "attempts", "problem"),
    [
        ("503", 5, "answers 503, the last of 5 attempts; check the server"),
        ("404", 1, "there is no such file; check the URL"),
        ("403", 1, r"access is refused \(403\); check the credentials"),
        ("cut", 5, r"(answers with|fails).*the last of 5 attempts"),
    ],
)
def test_the_last_attempt_is_one_error(
    own: SlowServer, tmp_path: Path, capfd: pytest.CaptureFixture, status: str, attempts: int, problem: str
):
    (own.root / "a.jsonl").write_text('{"text": "a"}\n' * 100)
    (file,) = data_files(f"{own.url}/a.jsonl", copies(tmp_path))
    own.fail([status] * 20)
    with pytest.raises(UserError, match=rf"a.jsonl.*{problem}"):
        file.read_bytes()
    assert len([path for method, path, _ in own.requests if method == "GET"]) == attempts
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == max(0, attempts - 2)
    assert all(f"try {i} of 5 in" in line for i, line in enumerate(lines, 3))


def test_a_file_that_is_not_parquet_is_not_read_whole(server: SlowServer, tmp_path: Path):
    with pytest.raises(UserError, match=r"0\.jsonl is damaged, or not in the expected format"):
        parts_of(tmp_path, "parquet", f"{server.url}/jsonl/0.jsonl")
    assert server.sent < 100


def test_a_damaged_line_is_named_by_its_byte(own: SlowServer, tmp_path: Path):
    (own.root / "a.jsonl").write_text('{"text": "a"}\n{"text"\n')
    (part,) = parts_of(tmp_path, "jsonl", f"{own.url}/a.jsonl")
    with pytest.raises(UserError, match=f"{own.url}/a.jsonl, at byte 14, is not JSON"):
        read(part)


def test_files_that_are_not_there(server: SlowServer, tmp_path: Path):
    with pytest.raises(UserError, match="there is no such file"):
        data_files(f"{server.url}/absent.jsonl", copies(tmp_path))
    with pytest.raises(UserError, match=r"absent\*.jsonl matches no file; on a web server, a glob needs a page"):
        parts_of(tmp_path, "jsonl", f"{server.url}/jsonl/absent*.jsonl")
    with pytest.raises(UserError, match=r"fails .*the last of 5 attempts"):
        data_files("http://127.0.0.1:1/a.jsonl", copies(tmp_path))


def test_a_query_is_no_pattern(server: SlowServer, tmp_path: Path):
    (file,) = data_files(f"{server.url}/jsonl/0.jsonl?a=1&b=x", copies(tmp_path))
    assert (file.name, file.suffix) == ("0.jsonl", ".jsonl")
    assert ("HEAD", "/jsonl/0.jsonl?a=1&b=x", None) in server.requests


def test_a_server_without_ranges_is_refused(own: SlowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (own.root / "a.jsonl").write_text('{"text": "a"}\n' * 9000)
    monkeypatch.setattr("slow_server._Handler.parse_request", _without_range)
    (file,) = data_files(f"{own.url}/a.jsonl", copies(tmp_path))
    with pytest.raises(UserError, match="does not answer with ranges of a file; copy"), file.open() as opened_file:
        opened_file.read()


def _without_range(handler: Any) -> bool:
    import http.server

    parsed = http.server.BaseHTTPRequestHandler.parse_request(handler)
    del handler.headers["Range"]
    return parsed


@pytest.mark.parametrize(
    ("url", "extra"), [("gs://b/x", "gcs"), ("s3://b/x", "s3"), ("hf://datasets/a/b/x", "hf"), ("http://b/x", "http")]
)
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, extra: str):
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError

    monkeypatch.setattr(attempts, "_opened", missing)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(UserError, match=rf"{url}: a package is missing: pip install 'trainer\[{extra}\]'"):
        data_files(url, copies(tmp_path))


def test_the_hub_is_not_asked_against_the_users_will(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE forbids"):
        data_files("hf://datasets/a/b/x.jsonl", copies(tmp_path))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("dataset_type=grain grain_train_files=az://a/b", "data are read from gs://, s3://, hf://, http://, https://"),
        ("dataset_type=grain grain_train_files=/a/*.jsonl,1;ftp://a/b,2", "data are read from gs://"),
        ("dataset_type=hf hf_path=json hf_train_files=gs://", "nothing follows the scheme"),
        ("dataset_type=tfds dataset_name=x dataset_path=az://a", "data are read from gs://"),
    ],
)
def test_urls_that_are_refused_without_a_request(words: str, problem: str):
    with pytest.raises(UserError, match=problem):
        load(words.split(" "))


def test_a_configuration_is_read_without_a_request():
    urls = {"grain_train_files": "http://127.0.0.1:1/*.jsonl,0.5;gs://b/c,0.5", "grain_eval_files": "s3://b/c?"}
    config = load(["dataset_type=grain", *(f"{key}={value}" for key, value in urls.items())]).config
    assert config.grain_train_files == urls["grain_train_files"]
    load(["dataset_type=grain", "grain_train_mixture_config_path=http://127.0.0.1:1/mixture.json"])


@pytest.mark.parametrize("way", WAYS)
def test_a_tfds_folder_at_a_url(own: SlowServer, tmp_path: Path, way: str):
    write_tfds(own.root)
    keys = {"dataset_type": "tfds", "tokenizer_type": "bytes", "data_pipeline": way, "eval_interval": 1}
    split = {"train_split": "train[2:13]", "eval_split": "validation"}
    near = opened(tmp_path / "near", **keys, **split, dataset_path=own.root, dataset_name="tiny/made:1.2.3")
    lines: list[str] = []
    far = config_of(tmp_path / "far", **keys, **split, dataset_path=f"{own.url}/", dataset_name="tiny/made")
    dataset = open_dataset(far, lines.append)
    for (left, _), (right, _) in zip(batches(near, 5), batches(dataset, 5), strict=True):
        assert all((left[name] == right[name]).all() for name in left)
    both = [one.evaluation.rows(np.arange(one.evaluation.size)) for one in (near, dataset)]
    assert all((both[0][name] == both[1][name]).all() for name in both[0])
    assert sum("cannot be read by ranges" in line for line in lines) == 2
    for name, message in (
        ("tiny/made:9.9.9", "there is no such file"),
        ("tiny", "holds made; write name:version"),
    ):
        with pytest.raises(UserError, match=message):
            opened(tmp_path / "far", **keys, dataset_path=own.url, dataset_name=name)


def test_a_mixture_at_a_url(server: SlowServer, own: SlowServer, tmp_path: Path):
    mixture = {kind: {"path": f"{server.url}/jsonl/{j}.jsonl", "weight": j + 1} for j, kind in enumerate("ab")}
    (own.root / "mixture.json").write_text(json.dumps(mixture))
    keys = KEYS | {"grain_file_type": "jsonl", "grain_train_mixture_config_path": f"{own.url}/mixture.json"}
    source = open_source(config_of(tmp_path, **keys))
    assert source.weights == (1, 2)
    assert [len(list(corpus.records())) for corpus in source.train] == [150, 150]


def test_megatron_files_are_copied(own: SlowServer, tmp_path: Path):
    for name in "ab":
        write_indexed(own.root / name, [[ids] for ids in documents_of(40, seed=ord(name))], "u2")
    keys = {"dataset_type": "grain", "grain_file_type": "mmap"}
    local = opened(tmp_path / "cache", **keys, grain_train_files=f"{own.root}/*")
    there = [
        opened(tmp_path / "cache", **keys, grain_train_files=f"{own.url}/*.idx"),
        opened(tmp_path / "cache", **keys, grain_train_files=f"{own.url}/"),
    ]
    for dataset in there:
        assert_same(batches(local, 5), batches(dataset, 5))
    with pytest.raises(UserError, match="raise remote_copies_gib"):
        opened(tmp_path / "other", **keys, grain_train_files=f"{own.url}/a", remote_copies_gib=0)


def test_files_that_datasets_reads_are_copied(server: SlowServer, root: Path, tmp_path: Path):
    keys = KEYS | {"dataset_type": "hf", "hf_path": "json", "hf_train_files": f"{server.url}/jsonl/*.jsonl"}
    size = sum(path.stat().st_size for path in (root / "jsonl").iterdir())
    for sent in (size, size, 2 * size):
        if sent == 2 * size:
            shutil.rmtree(tmp_path / "cache" / "copies")
        (corpus,) = open_source(config_of(tmp_path / "cache", **keys), say_nothing).train
        assert [record.values[0] for record in corpus.records()] == [row["text"] for row in ROWS[::2] + ROWS[1::2]]
        assert server.sent == sent
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == 1  # the table is not made again
    with pytest.raises(UserError, match="URLs are read with hf_path=arrow, csv, json"):
        open_source(config_of(tmp_path / "cache", **keys | {"hf_path": root}))


def test_a_remote_file_is_like_a_path(server: SlowServer, root: Path, tmp_path: Path):
    (file,) = data_files(f"{server.url}/jsonl/0.jsonl", copies(tmp_path))
    path = root / "jsonl" / "0.jsonl"
    assert file.read_bytes() == path.read_bytes()
    assert isinstance(file, RemoteFile)
    assert len({file, pickle.loads(pickle.dumps(file))}) == 1
    with file.open("rb") as there, path.open("rb") as here:
        for at, count in ((5, 10), (30_000, 20_000), (7, 3), (-10, 100)):
            whence = 0 if at >= 0 else 2
            assert there.seek(at, whence) == here.seek(at, whence)
            assert there.read(count) == here.read(count)
        assert there.readline() == here.readline() == b""


def test_a_folder_that_is_not_listed_at_once_is_not_left_out(own: SlowServer, tmp_path: Path):
    for name in ("a", "b", "c"):
        write_corpus(own.root / name, "jsonl", 9)
    own.listing = iter(["reset", "", "503", "reset", "reset", "late", "503"])
    found = data_files(f"{own.url}/*/*.jsonl", copies(tmp_path))
    assert [file.url.removeprefix(own.url) for file in found] == [
        f"/{name}/{j}.jsonl" for name in "abc" for j in range(3)
    ]
    own.listing = itertools.repeat("503")
    with pytest.raises(UserError, match="answers 503, the last of 5 attempts"):
        data_files(f"{own.url}/*/*.jsonl", copies(tmp_path))


@pytest.mark.parametrize("pattern", ["*/*.jsonl", "**/*.jsonl", "w*/?.jsonl", "web/[0-9].jsonl", "web/.*", "**/.*"])
def test_patterns_find_the_same_files_in_the_same_order(own: SlowServer, tmp_path: Path, pattern: str):
    for name in ("web", "web-2", "web.old", "web/deep/er", ".hidden"):
        (own.root / name).mkdir(parents=True, exist_ok=True)
        for file in ("0.jsonl", "1.jsonl", ".2.jsonl", "a b.jsonl"):
            (own.root / name / file).write_text("{}\n")
    pattern_of_url = pattern
    if "?" in pattern:
        with pytest.raises(UserError, match="a glob cannot have a query"):
            data_files(f"{own.url}/{pattern}", copies(tmp_path))
        return
    near = [str(path.relative_to(own.root)) for path in data_files(f"{own.root}/{pattern}", copies(tmp_path))]
    far = data_files(f"{own.url}/{pattern_of_url}", copies(tmp_path))
    assert [file.url.removeprefix(f"{own.url}/").replace("%20", " ") for file in far] == near
    assert near


def test_a_server_without_ranges_is_refused_before_it_has_sent_all(own: SlowServer, tmp_path: Path):
    (own.root / "a.jsonl").write_bytes(b'{"text": "x"}\n' * 10_000_000)
    own.ranges = False
    with pytest.raises(UserError, match="does not answer with ranges of a file"):
        opened(tmp_path, **keys_of("jsonl", f"{own.url}/a.jsonl"))


def test_secrets_of_a_url_are_not_shown(own: SlowServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    write_corpus(own.root / "a", "jsonl")
    url = own.url.replace("http://", "http://user:password@") + "/a/0.jsonl?signature=hunter2"
    own.fail(["503", "503"])
    lines: list[str] = []
    dataset = open_dataset(config_of(tmp_path / "cache", **keys_of("jsonl", url)), lines.append)
    written = [path.read_text() for path in (tmp_path / "cache").rglob("meta.json")]
    shown = "".join([str(dataset), *lines, *written, *capfd.readouterr()])
    assert "0.jsonl?..." in shown
    assert "hunter2" not in shown
    assert "password" not in shown
    with pytest.raises(UserError) as caught:
        opened(tmp_path / "cache", **keys_of("jsonl", url.replace("0.jsonl", "none.jsonl")))
    assert "hunter2" not in str(caught.value)


def test_copies_of_urls_that_differ_in_the_query_differ(tmp_path: Path):
    class ByQuery(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            data = gzip.compress(json.dumps({"text": self.path[-1] * 50}).encode(), mtime=0)
            start, _, stop = self.headers.get("Range", "bytes=0-999").removeprefix("bytes=").partition("-")
            part = data[int(start) : int(stop) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop}/{len(data)}")
            self.send_header("Content-Length", str(len(data if self.command == "HEAD" else part)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(part)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ByQuery) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/get.jsonl.gz?id="
        for number in "12":
            (part,) = parts_of(tmp_path, "jsonl", url + number)
            assert [values for _, _, values in read(part)] == [(number * 50,)]
        server.shutdown()


def test_escapes_in_a_query_reach_the_server(own: SlowServer, tmp_path: Path):
    (own.root / "a b.jsonl").write_text("{}\n")
    (file,) = data_files(f"{own.url}/a b.jsonl?x=a%2Fb%2Cc", copies(tmp_path))
    assert file.read_bytes() == b"{}\n"
    assert {path for _, path, _ in own.requests} == {"/a%20b.jsonl?x=a%2Fb%2Cc"}


def test_a_checksum_may_contain_the_mark_of_weak_etags():
    marked = RemoteFile("gs://b/x", 3, {"md5Hash": "1B2M2Y8AsgTpgAmW/hCfg=="}, None)  # type: ignore[arg-type]
    assert marked.content
    assert RemoteFile("http://b/x", 3, {"ETag": 'W/"1"'}, None).content is None  # type: ignore[arg-type]


def test_megatron_files_of_a_mixture_at_a_url(own: SlowServer, tmp_path: Path):
    for name in ("a", "b"):
        write_indexed(own.root / name, [[ids] for ids in documents_of(40, seed=ord(name))], "u2")
    mixture = {name: {"path": f"{own.url}/{name}", "weight": 1} for name in ("a", "b")}
    (own.root / "mixture.json").write_text(json.dumps(mixture))
    keys = {"dataset_type": "grain", "grain_file_type": "mmap", "eval_interval": -1}
    dataset = opened(tmp_path, **keys, grain_train_mixture_config_path=f"{own.url}/mixture.json")
    assert [component.share for component in dataset.mixture] == [0.5, 0.5]


def test_large_copies_are_counted_one_after_the_other(server: SlowServer, root: Path, tmp_path: Path):
    size = max(path.stat().st_size for path in (root / "arrayrecord").iterdir())
    keys = keys_of("arrayrecord", f"{server.url}/arrayrecord/*") | {"remote_copies_gib": 1.5 * size / 2**30}
    keys |= {"prepare_part_mib": size / 3 / 2**20, "prepare_workers": 1}
    near = opened(tmp_path / "near", **keys | {"grain_train_files": f"{root}/arrayrecord/*"})
    far = opened(tmp_path / "far", **keys)
    for (left, _), (right, _) in zip(batches(near, 5), batches(far, 5), strict=True):
        assert all((left[name] == right[name]).all() for name in left)


def test_data_on_the_hub_are_read_after_the_hub_was_turned_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRAINER_TURNED_HUB_OFF", raising=False)
    monkeypatch.setattr(attempts, "_opened", lambda scheme: fsspec.filesystem("memory"))
    attempts.turn_hub_off()
    attempts.turn_hub_off()
    assert attempts.system_of("hf://datasets/a/b")[1]
    for name in ("HF_HUB_OFFLINE", "TRAINER_TURNED_HUB_OFF"):
        os.environ.pop(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    attempts.turn_hub_off()
    with pytest.raises(UserError, match="HF_HUB_OFFLINE forbids"):
        attempts.system_of("hf://datasets/a/b")
