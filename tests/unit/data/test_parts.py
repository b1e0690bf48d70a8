"""Rows that are packed within parts: which records a part has, and that rows do not depend on the processes."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sample_data import LENGTH, config_of, document, opened, say_nothing, write_corpus

from trainer.config.errors import UserError
from trainer.data import cache, parts
from trainer.data.dataset import open_dataset, text_encoder
from trainer.data.documents import Counts, Record
from trainer.data.opened import open_documents
from trainer.data.packing import Packing
from trainer.data.readers import JsonlPart, Part
from trainer.data.sources import open_source
from trainer.data.tables import ParquetPart

KINDS = ("jsonl", "parquet", "arrayrecord", "tfrecord", "text")
BYTES = {"dataset_type": "grain", "tokenizer_type": "bytes", "prepare_workers": 1}


def keys_of(folder: Path, kind: str) -> dict:
    return BYTES | {"grain_file_type": kind, "grain_train_files": f"{folder}/*"}


def read(part: Part, edges: list[int | None]) -> list[Record]:
    pairs = zip([0, *edges[1:]], [*edges[1:], None], strict=True)
    return [record for start, stop in pairs for _, _, record in part.read(start or 0, stop)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_record_is_in_one_piece(tmp_path: Path, kind: str):
    config = config_of(tmp_path / "cache", **keys_of(write_corpus(tmp_path / "files", kind), kind))
    (corpus,) = open_source(config).train
    whole = [record.values for record in corpus.records()]
    assert len(whole) >= 25
    sizes = {part.size for part in corpus.parts}
    counts = set()
    for size in (1, 37, 100, max(sizes) // 2, max(sizes), sum(sizes)):
        pieces = [*corpus.pieces(size)]
        assert [record.values for record in corpus.records(pieces=pieces)] == whole
        groups = parts.parts_of([corpus], size)
        assert [pair for group in groups for pair in group] == [(0, piece) for piece in pieces]
        counts.add(len(groups))
        cut = {piece.part for piece in pieces if piece.stop is not None}
        assert bool(cut) == (kind in ("jsonl", "parquet", "arrayrecord") and size < max(sizes) / 1.5)
    assert len(counts) > 1
    assert len(parts.parts_of([corpus, corpus], 0)) == 1
    assert len(parts.parts_of([corpus, corpus], 2 * sum(part.size for part in corpus.parts))) == 1


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n \n"])
def test_lines_are_cut_at_any_byte(tmp_path: Path, end: str):
    lines = [json.dumps({"text": "ä" * (i % 5), "n": i}, ensure_ascii=False) for i in range(6)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:3]) + "\n\n\r\n" + "\r\n".join(lines[3:]) + end)
    part = JsonlPart(tmp_path / "a.jsonl", ("n",))
    for cut in range(1, part.size):
        records = read(part, [0, cut])
        assert [record.values[0] for record in records] == [*range(6)]
        assert [str(record.where).rpartition(" ")[2] for record in records] == ["1", "2", "3", "6", "7", "8"]


def test_a_long_line_is_skipped_by_the_pieces_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.data.readers._BLOCK", 16)
    (tmp_path / "a.jsonl").write_text(json.dumps({"n": "x" * 200}) + "\n" + json.dumps({"n": "y"}))
    part = JsonlPart(tmp_path / "a.jsonl", ("n",))
    assert [record.values[0][0] for record in read(part, [0, 30, 60, 90])] == ["x", "y"]


def test_compressed_lines_are_not_cut(tmp_path: Path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": document(i)}) + "\n" for i in range(50))
    assert JsonlPart(tmp_path / "a.jsonl.gz", ("text",)).cuts(5) == []


def test_parquet_is_cut_between_row_groups_by_their_sizes(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", pyarrow.schema([("text", pyarrow.string())])) as writer:
        for rows, length in ((1, 9000), (7, 10), (3, 10), (2, 10)):
            texts = ["".join(chr(97 + (7 * i + j * j) % 26) for j in range(length)) for i in range(rows)]
            writer.write_table(pyarrow.table({"text": texts}))
    part = ParquetPart(tmp_path / "a.parquet", ("text",))
    assert part.cuts(2) == [1]
    assert part.cuts(10000) == [1, 8, 11]
    assert [len([*part.read(a, b)]) for a, b in ((0, 1), (1, 11), (11, None))] == [1, 10, 2]


@pytest.mark.parametrize("kind", ["concat_then_split", "best_fit"])
def test_the_rows_of_a_part_are_those_of_its_documents(tmp_path: Path, kind: str):
    keys = keys_of(write_corpus(tmp_path / "files", "jsonl", 60), "jsonl") | {"grain_packing_type": kind}
    config = config_of(tmp_path / "cache", **keys, prepare_part_mib=0.001)
    documents = open_documents(config, tmp_path / "cache", say_nothing, text_encoder)
    (corpus,), (rows,) = documents.source.train, documents.prepare(say_nothing).train
    groups = [[piece for _, piece in part] for part in parts.parts_of([corpus], round(0.001 * 2**20))]
    packing = Packing(LENGTH, kind)
    assert len(groups) > 4
    expected = [
        packed.row
        for group in groups
        for packed in packing.rows(
            [
                (None, one)
                for record in corpus.records(pieces=group)
                for one in documents.encoder.encode([record], Counts())
                if one is not None
            ],
            Counts(),
        )
    ]
    assert rows.source.size == len(expected) == rows.meta["rows"]
    order = np.random.default_rng(0).permutation(len(expected))
    batch = rows.source.rows(order)
    for name, field in (("inputs", "inputs"), ("targets", "targets"), ("inputs_segmentation", "segmentation")):
        np.testing.assert_array_equal(batch[name], np.stack([expected[i][field] for i in order]))
    whole = opened(tmp_path / "cache", **keys)
    assert rows.meta["documents"] == int(whole.summary.split(": ")[1].split(" ")[0]) == 60


def files_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_rows_do_not_depend_on_the_number_of_processes(tmp_path: Path):
    keys = keys_of(write_corpus(tmp_path / "files", "jsonl", 90), "jsonl") | {"prepare_part_mib": 0.002}
    made = []
    for workers in (1, 2, 3):
        opened(tmp_path / str(workers), **keys | {"prepare_workers": workers, "eval_interval": 1})
        made.append(files_of(tmp_path / str(workers)))
    assert made[0] == made[1] == made[2]
    assert sum(name.endswith("rows.npy") for name in made[0]) > 5


def test_finished_parts_are_kept_and_damaged_ones_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = keys_of(write_corpus(tmp_path / "files", "jsonl", 60), "jsonl") | {"prepare_part_mib": 0.002}
    written, write = [], parts.write

    def failing(folder: Path, *args, **settings):
        if len(written) == 3:
            raise KeyboardInterrupt
        return counting(folder, *args, **settings)

    def counting(folder: Path, *args, **settings):
        written.append(folder.name.partition(".")[0])
        return write(folder, *args, **settings)

    monkeypatch.setattr(parts, "write", failing)
    with pytest.raises(KeyboardInterrupt):
        opened(tmp_path / "cache", **keys)
    (temporary,) = (tmp_path / "cache").glob("train-*.tmp")
    with (temporary / "part-00001" / "rows.npy").open("ab") as file:
        file.write(b"x")
    monkeypatch.setattr(
        parts, "write", lambda *args, **rest: written.append(args[0].name.partition(".")[0]) or write(*args, **rest)
    )
    opened(tmp_path / "cache", **keys)
    assert written[:3] == [f"part-0000{i}" for i in range(3)]
    assert written[3] == "part-00001"
    assert written[4] == "part-00003"
    assert len(written) == len({*written}) + 1
    opened(tmp_path / "other", **keys)
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "other")


def test_a_bad_record_leaves_nothing(tmp_path: Path):
    folder = write_corpus(tmp_path / "files", "jsonl", 60)
    with (folder / "2.jsonl").open("a") as file:
        file.write("{\n")
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"2\.jsonl, line 21, is not JSON"):
            opened(
                tmp_path / "cache", **keys_of(folder, "jsonl") | {"prepare_part_mib": 0.002, "prepare_workers": workers}
            )
        assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_part_without_documents_has_no_rows(tmp_path: Path):
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": "" if 20 < i < 80 else document(i)}) + "\n" for i in range(100))
    keys = BYTES | {"grain_file_type": "jsonl", "grain_train_files": tmp_path / "a.jsonl", "prepare_part_mib": 0.0003}
    dataset = open_dataset(config_of(tmp_path / "cache", **keys), say_nothing)
    (folder,) = (tmp_path / "cache").glob("train-*[!k]")
    meta = cache.read_meta(folder)
    assert 0 < len(meta["stored"]) < meta["parts"]
    assert meta["rows"] == sum(count for _, count in meta["stored"])
    assert dataset.epoch.rows == meta["rows"]


def test_few_parts_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.data.rows._OPEN", 2)
    keys = keys_of(write_corpus(tmp_path / "files", "jsonl", 60), "jsonl") | {"prepare_part_mib": 0.0005}
    source = opened(tmp_path / "cache", **keys, held_out_share=0).train_stream(rows=1)._source
    assert len([*tmp_path.rglob("part-*")]) > 8
    before = len([*Path("/proc/self/fd").iterdir()])
    batch = source.rows(np.random.default_rng(0).permutation(source.size))
    assert len(batch["inputs"]) == source.size
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 4


def test_small_mixtures_hold_out_rows_of_one_part(tmp_path: Path):
    files = f"{write_corpus(tmp_path / 'a', 'jsonl', 40)}/*;{write_corpus(tmp_path / 'b', 'jsonl', 40)}/*"
    keys = BYTES | {"grain_file_type": "jsonl", "grain_train_files": files, "held_out_share": 0.3, "eval_interval": 1}
    opened(tmp_path / "cache", **keys)
    assert not [*tmp_path.rglob("part-*")]
    (folder,) = (tmp_path / "cache").glob("held-out-*[!k]")
    opened(tmp_path / "cache", **keys, prepare_part_mib=0)
    assert [*(tmp_path / "cache").glob("held-out-*[!k]")] == [folder]


@pytest.mark.parametrize("how", ["script", "stdin"])
def test_a_program_without_a_guard_ends(tmp_path: Path, how: str):
    write_corpus(tmp_path / "files", "jsonl", 60)
    program = """
from trainer.config.load import load
from trainer.data.dataset import open_dataset
words = ["dataset_type=grain", "grain_file_type=jsonl", "grain_train_files=files/*", "tokenizer_type=bytes"]
words += ["vocab_size=300", "max_target_length=32", "prepare_part_mib=0.002", "prepare_workers=2", "eval_interval=-1"]
print(open_dataset(load([*words, "data_cache_directory=cache"]).config, print).epoch.rows, "rows")
"""
    (tmp_path / "program.py").write_text(program)
    words = [sys.executable, "program.py" if how == "script" else "-"]
    settings = {"capture_output": True, "text": True, "cwd": tmp_path, "timeout": 60}
    done = subprocess.run(words, input=program if how == "stdin" else None, check=False, **settings)
    if how == "script":
        assert done.returncode == 1
        assert 'lacks the guard `if __name__ == "__main__":`' in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "rows" in done.stdout


def test_a_table_of_nulls_has_no_text(tmp_path: Path):
    import datasets

    datasets.Dataset.from_dict({"text": [None] * 5}).save_to_disk(tmp_path / "set")
    with pytest.raises(UserError, match="no document with text"):
        opened(tmp_path / "cache", dataset_type="hf", hf_path=tmp_path / "set", tokenizer_type="bytes")
