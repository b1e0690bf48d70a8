"""Limits that the other tests' data do not reach: lowered here, or reached with larger data."""

import json
from pathlib import Path

import numpy as np
import pytest
from sample_data import opened

from trainer.config.errors import UserError
from trainer.data import parts, prepare

DOCUMENTS = 40
TEXTS = [[f"{name}{i} " * 5 for i in range(DOCUMENTS)] for name in ("first", "second")]
LARGE = 1 << 20  # bytes read at once when counting the lines before an error


@pytest.fixture
def files(tmp_path) -> tuple[str, str]:
    """Two files, each a corpus."""
    for i, texts in enumerate(TEXTS):
        (tmp_path / f"{i}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return f"{tmp_path}/0.jsonl", f"{tmp_path}/1.jsonl"


def dataset(cache: Path, files: str):
    return opened(cache, dataset_type="grain", grain_file_type="jsonl", grain_train_files=files)


def test_a_bpe_is_trained_on_no_more_than_the_limit_in_the_ratio_of_the_weights(monkeypatch, tmp_path, files):
    train = prepare.train_bpe

    def trained_on(limit: int) -> list[str]:
        """Uses one cache folder for all limits, because the limit is part of the tokenizer's cache key."""
        seen: list[str] = []
        monkeypatch.setattr(prepare, "train_bpe", lambda texts, size: (seen.extend(texts), train(texts, size))[1])
        monkeypatch.setattr(prepare, "BPE_BYTES", limit)
        dataset(tmp_path / "cache", f"{files[0]},3;{files[1]},1")
        return seen

    everything, limited = trained_on(1 << 20), trained_on(800)
    for texts, limit in zip(TEXTS, (600, 200), strict=True):
        whole, taken = ([text for text in seen if text in texts] for seen in (everything, limited))
        assert taken == whole[: len(taken)]
        size = sum(map(len, taken))
        assert size - len(taken[-1]) < limit <= size < sum(map(len, whole))


def test_rows_do_not_depend_on_how_many_documents_are_encoded_at_once(monkeypatch, tmp_path, files):
    def rows(cache):
        source = dataset(tmp_path / cache, files[0]).train_stream(rows=1)._source
        return source.rows(np.arange(source.size))

    whole = rows("whole")
    monkeypatch.setattr(parts, "_CHUNK", 7)
    chunked = rows("chunked")
    assert whole.keys() == chunked.keys()
    for name, values in whole.items():
        np.testing.assert_array_equal(chunked[name], values, err_msg=name)


@pytest.mark.parametrize("lines", [1, 1000])
def test_the_line_of_a_mistake_is_counted_through_a_large_file(tmp_path, lines):
    """Counting the lines before the mistake takes more than one read."""
    line = json.dumps({"text": "x" * (2 * LARGE // lines)}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * lines + "broken\n")
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": tmp_path / "a.jsonl"}
    with pytest.raises(UserError, match=rf"a.jsonl, line {lines + 1}, is not JSON"):
        opened(tmp_path / "cache", **keys)
