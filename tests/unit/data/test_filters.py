"""Filters of records: what they drop, how it is counted, and that duplicates do not depend on parts or processes."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filters_of_tests import shout
from sample_data import config_of, document, opened, say_nothing, write_records
from stream_cases import batches

from trainer.config.errors import UserError
from trainer.data import duplicates
from trainer.data.dataset import open_dataset, text_encoder
from trainer.data.opened import open_documents
from trainer.data.sources import open_source

KEYS = {"dataset_type": "grain", "tokenizer_type": "bytes", "prepare_workers": 1, "held_out_share": 0}
FORMATS = ("jsonl", "parquet", "arrayrecord", "tfrecord")


def kept(tmp_path: Path, kind: str = "jsonl", **keys: Any) -> list[str]:
    """Returns the texts of the records of `a.KIND` that the filters keep."""
    more = {"grain_file_type": kind, "grain_train_files": tmp_path / f"a.{kind}"}
    (corpus,) = open_source(config_of(tmp_path / "cache", **KEYS, **more, **keys)).train
    values = [record.values[0] for record in corpus.records()]
    return [value.decode() if isinstance(value, bytes) else value for value in values]


@pytest.mark.parametrize("kind", FORMATS)
def test_filters_act_alike_in_every_format(tmp_path: Path, kind: str):
    texts = ["short", "cafe\u0301 \ufb01ne", "x" * 40, "medium text"]
    write_records(tmp_path / f"a.{kind}", kind, [{"text": text, "number": [1]} for text in texts])
    assert kept(tmp_path, kind) == texts
    assert kept(tmp_path, kind, document_min_length=6) == texts[1:]
    assert kept(tmp_path, kind, document_max_length=11) == [texts[0], texts[1], texts[3]]
    assert kept(tmp_path, kind, document_max_length=8, document_normalization="NFC") == ["short", "caf\u00e9 \ufb01ne"]
    assert kept(tmp_path, kind, document_normalization="NFKC") == [
        unicodedata.normalize("NFKC", text) for text in texts
    ]
    assert kept(tmp_path, kind, document_filter="filters_of_tests:shout") == [shout({"a": text})["a"] for text in texts]


def test_a_function_sees_all_columns_and_may_drop_records(tmp_path: Path):
    write_records(tmp_path / "a.jsonl", "jsonl", [{"text": document(i), "number": i} for i in range(10)])
    keys = {
        "grain_file_type": "jsonl",
        "grain_train_files": tmp_path / "a.jsonl",
        "train_data_columns": "[text,number]",
    }
    config = config_of(tmp_path / "cache", **KEYS, **keys, document_filter="filters_of_tests:even")
    assert [record.values[1] for record in open_source(config).train[0].records()] == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "failing",
            r"line \d+: document_filter=filters_of_tests:failing failed: AttributeError.*_of_tests.py, line",
        ),
        ("wrong", "returned dict, not True, False, None or a dict with text"),
        ("missing", "has no function missing"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_that_fails_is_named(tmp_path: Path, function: str, message: str, workers: int):
    write_records(tmp_path / "a.jsonl", "jsonl", [{"text": document(i)} for i in range(40)])
    keys = {"grain_file_type": "jsonl", "grain_train_files": tmp_path / "a.jsonl", "prepare_part_mib": 0.001}
    keys |= {"document_filter": f"filters_of_tests:{function}", "prepare_workers": workers}
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "cache", **KEYS | keys)


@pytest.mark.parametrize("way", ["prepared", "streaming"])
def test_what_is_dropped_is_counted(tmp_path: Path, way: str):
    write_records(tmp_path / "a.jsonl", "jsonl", [{"text": "x" * i} for i in range(1, 31)])
    keys = {"grain_file_type": "jsonl", "grain_train_files": tmp_path / "a.jsonl", "enable_data_shuffling": False}
    lines: list[str] = []
    config = config_of(
        tmp_path / "cache", **KEYS | keys, document_min_length=5, document_max_length=24, data_pipeline=way
    )
    dataset = open_dataset(config, lines.append)
    batches(dataset, 10)
    text = "\n".join(lines)
    assert f"document_min_length=5 characters; the first: {tmp_path}/a.jsonl, line 1" in text
    assert f"document_max_length=24 characters; the first: {tmp_path}/a.jsonl, line 25" in text
    if way == "prepared":
        assert "4 documents are dropped, because they have fewer" in text
        assert "6 documents are dropped, because they have more" in text
        assert "20 documents" in dataset.summary


def test_nothing_left_is_an_error_with_the_counts(tmp_path: Path):
    write_records(tmp_path / "a.jsonl", "jsonl", [{"text": "x"}] * 3)
    keys = {"grain_file_type": "jsonl", "grain_train_files": tmp_path / "a.jsonl", "document_min_length": 2}
    with pytest.raises(UserError, match="nothing is left:\n3 documents are dropped, because they have fewer"):
        opened(tmp_path / "cache", **KEYS | keys)


def texts_of(tmp_path: Path, part: float, **keys: Any) -> tuple[list[str], dict[str, Any]]:
    """Returns the texts of the prepared documents, decoded from their rows, and the counts."""
    more = {"grain_file_type": "jsonl", "grain_train_files": f"{tmp_path}/*.jsonl", "prepare_part_mib": part}
    config = config_of(tmp_path / f"cache{part}{keys}", **KEYS | more | {"packing": False} | keys)
    opened_documents = open_documents(config, tmp_path / f"cache{part}{keys}", say_nothing, text_encoder)
    (rows,) = opened_documents.prepare(say_nothing).train
    batch = rows.source.rows(np.arange(rows.source.size))
    texts = []
    for inputs, segments in zip(batch["inputs"], batch["inputs_segmentation"], strict=True):
        texts.append(bytes(i for i in inputs[segments != 0] if i < 256).decode())
    return texts, rows.meta


def test_the_first_of_equal_documents_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    texts = [f"text {number}" for number in rng.integers(0, 60, 200)]
    for j in range(3):
        lines = [json.dumps({"text": text}) for text in texts[j * 70 : (j + 1) * 70]]
        (tmp_path / f"{j}.jsonl").write_text("\n".join(lines))
    expected = [*dict.fromkeys(texts)]
    for part, keys, memory in (
        (0, {}, 1 << 28),
        (0.0005, {}, 1 << 28),
        (0.0005, {"prepare_workers": 2}, 1 << 28),
        (0.0005, {"held_out_share": 0}, 100),  # too little memory, so hashes are compared in many ranges
    ):
        monkeypatch.setattr(duplicates, "MEMORY", memory)
        found, meta = texts_of(tmp_path, part, drop_duplicates=True, **keys)
        assert found == expected, (part, keys)
        assert meta["documents"] == len(expected)
        ((count, line),) = meta["noticed"].values()
        assert count == len(texts) - len(expected)
        again = next(i for i, text in enumerate(texts) if text in texts[:i])
        assert line.endswith(f"{again // 70}.jsonl, line {again % 70 + 1}")
    assert texts_of(tmp_path, 0.0005)[0] == texts
    assert not [*tmp_path.rglob("duplicates")]


def test_records_that_become_equal_are_duplicates(tmp_path: Path):
    lines = [json.dumps({"text": text}) for text in ("caf\u00e9", "cafe\u0301", "other")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found, _ = texts_of(tmp_path, 0, drop_duplicates=True, document_normalization="NFC")
    assert found == ["caf\u00e9", "other"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"drop_duplicates": True, "data_pipeline": "streaming"}, "set data_pipeline=prepared"),
        ({"document_min_length": 9, "document_max_length": 8}, "no record has such a length"),
        ({"document_filter": "no function"}, "not the path of a function"),
        ({"document_normalization": "NFX"}, "one of"),
        ({"document_min_length": 3, "grain_file_type": "mmap"}, "the files contain token ids"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, keys: dict, message: str):
    with pytest.raises(UserError, match=message):
        config_of(tmp_path, **KEYS | {"grain_train_files": "a*"} | keys)
