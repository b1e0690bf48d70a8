"""Corpus, tokenizer and packing."""

from pathlib import Path

import numpy as np
import pytest

from trainer.data.batches import positions
from trainer.data.corpus import Document, fingerprint, read_corpus, stdlib_folder
from trainer.data.packing import pack
from trainer.data.tokenizer import Tokenizer

EOT = 0


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> Tokenizer:
    return Tokenizer.train([document.text for document in read_corpus(root)], 300)


def test_the_choice_of_held_out_files_is_stable():
    paths = ["abc.py", "http/server.py", "json/decoder.py", "pkgutil.py", "pydoc_data/topics.py", "trace.py"]
    assert [path for path in paths if Document(path, "", 0).held_out] == ["http/server.py", "pkgutil.py", "trace.py"]
    many = [Document(f"package/m{i}.py", "", 0).held_out for i in range(20000)]
    assert 0.045 < np.mean(many) < 0.055


def test_the_corpus_leaves_out_tests_empty_files_and_other_encodings(tmp_path: Path):
    for name, data in {
        "b.py": b"b = 1\r\n",
        "a/c.py": "\ufeffc = 'ä'\n".encode(),
        "empty.py": b"",
        "latin.py": "# ä\n".encode("latin-1"),
        "text.txt": b"no",
        "test/t.py": b"no",
        "a/tests/t.py": b"no",
        "idlelib/t.py": b"no",
        "site-packages/t.py": b"no",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    documents = read_corpus(tmp_path)
    assert [document.path for document in documents] == ["a/c.py", "b.py"]
    for document in documents:
        assert document.text.encode() == (tmp_path / document.path).read_bytes()
        assert document.size == len(document.text.encode())


def test_the_fingerprint_follows_names_and_contents():
    texts = [Document("a.py", "xy", 2), Document("b.py", "z", 1)]
    prints = [
        fingerprint(texts),
        fingerprint([Document("a.py", "xy", 2), Document("c.py", "z", 1)]),
        fingerprint([Document("a.py", "xy", 2), Document("b.py", "w", 1)]),
        fingerprint(texts[:1]),
    ]
    assert len(set(prints)) == 4


def test_the_standard_library_is_there():
    documents = read_corpus(stdlib_folder())
    assert len(documents) > 400
    assert sum(document.size for document in documents) > 8e6
    assert 10 < sum(document.held_out for document in documents) < 60


def test_text_survives_and_every_byte_is_counted(tokenizer: Tokenizer):
    for text in ["", "def f(x):\r\n\treturn 'ä€😀\x00'\n", "  <|endoftext|> is text here"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode([tokenizer.eot, *ids, tokenizer.eot]) == text
        assert tokenizer.bytes_per_token[ids].sum() == len(text.encode())
        assert tokenizer.eot not in ids
        assert tokenizer.encode_many([text, text]) == [ids, ids]
    assert tokenizer.bytes_per_token.shape == (tokenizer.vocab_size,) == (300,)
    assert tokenizer.bytes_per_token[tokenizer.eot] == 0
    assert sorted(tokenizer.bytes_per_token)[1] == 1


def test_a_saved_tokenizer_reads_back_the_same(tokenizer: Tokenizer, root: Path, tmp_path: Path):
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    text = "def f0_0(x):\n    return 'ä' <|endoftext|>"
    assert again.encode(text) == tokenizer.encode(text)
    assert (again.bytes_per_token == tokenizer.bytes_per_token).all()
    assert again.eot == tokenizer.eot
    Tokenizer.train([document.text for document in read_corpus(root)], 300).save(tmp_path / "second.json")
    assert (tmp_path / "second.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_documents_are_shifted_before_they_are_packed():
    rows = pack([[1, 2, 3], [4], [5, 6, 7, 8, 9]], EOT, 4)
    assert rows["inputs"].tolist() == [[0, 1, 2, 3], [0, 4, 0, 5], [6, 7, 8, 9]]
    assert rows["targets"].tolist() == [[1, 2, 3, 0], [4, 0, 5, 6], [7, 8, 9, 0]]
    assert rows["segmentation"].tolist() == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 1, 1, 1]]
    assert positions(rows["segmentation"]).tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]]


def test_the_last_row_is_padded():
    rows = pack([[1, 2], [3, 4]], EOT, 4)
    assert rows["segmentation"].tolist() == [[1, 1, 1, 2], [1, 1, 0, 0]]
    assert rows["inputs"].tolist() == [[0, 1, 2, 0], [3, 4, 0, 0]]
    assert rows["targets"].tolist() == [[1, 2, 0, 3], [4, 0, 0, 0]]


@pytest.mark.parametrize(("largest", "dtype"), [(65535, np.uint16), (65536, np.int32)])
def test_rows_are_stored_in_the_narrowest_type(largest: int, dtype: type):
    rows = pack([[largest]], EOT, 4)
    assert {values.dtype for values in rows.values()} == {np.dtype(dtype)}
    assert rows["targets"][0, 0] == largest
