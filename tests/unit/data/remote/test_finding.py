"""Data at URLs: which files are found, other formats, and errors in one message without secrets."""

import gzip
import http.server
import itertools
import json
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from megatron_files import documents_of, write_indexed
from remote_cases import KEYS, ROWS, copies, keys_of, parts_of, read
from sample_data import config_of, opened, say_nothing, write_corpus, write_tfds
from slow_server import SlowServer
from stream_cases import WAYS, assert_same, batches

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.data.sources import open_source
from trainer.runtime import attempts
from trainer.runtime.remote import RemoteFile, data_files


@pytest.mark.parametrize(
    ("status", "attempts", "problem"),
    [
        ("503", 5, "after 5 attempts it still answers 503; check the server"),
        ("404", 1, "there is no such file; check the URL"),
        ("403", 1, r"access is refused \(403\); check the credentials"),
        ("cut", 5, r"after 5 attempts it still (answers with|fails)"),
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
    with pytest.raises(UserError, match="after 5 attempts it still fails "):
        data_files("http://127.0.0.1:1/a.jsonl", copies(tmp_path))


def test_a_query_is_no_pattern(server: SlowServer, tmp_path: Path):
    (file,) = data_files(f"{server.url}/jsonl/0.jsonl?a=1&b=x", copies(tmp_path))
    assert (file.name, file.suffix) == ("0.jsonl", ".jsonl")
    assert ("HEAD", "/jsonl/0.jsonl?a=1&b=x", None) in server.requests


def test_a_server_without_ranges_is_refused(own: SlowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (own.root / "a.jsonl").write_text('{"text": "a"}\n' * 9000)
    monkeypatch.setattr("slow_server._Handler.parse_request", _without_range)
    (file,) = data_files(f"{own.url}/a.jsonl", copies(tmp_path))
    with pytest.raises(UserError, match="does not support range requests; copy"), file.open() as opened_file:
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
    monkeypatch.delenv("TRAINER_TURNED_HUB_OFF", raising=False)  # left by an earlier command in this process
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
    with pytest.raises(UserError, match="after 5 attempts it still answers 503"):
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
    with pytest.raises(UserError, match="does not support range requests"):
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
