"""The default corpus."""

from pathlib import Path

import numpy as np
import pytest

from trainer.config.errors import UserError
from trainer.data.stdlib import SourceFile, fingerprint, read_files, stdlib_corpora, stdlib_folder


def test_the_choice_of_held_out_files_is_stable():
    paths = ["abc.py", "http/server.py", "json/decoder.py", "pkgutil.py", "pydoc_data/topics.py", "trace.py"]
    assert [path for path in paths if SourceFile(path, "", 0).held_out] == ["http/server.py", "pkgutil.py", "trace.py"]
    many = [SourceFile(f"package/m{i}.py", "", 0).held_out for i in range(20000)]
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
    documents = read_files(tmp_path)
    assert [document.path for document in documents] == ["a/c.py", "b.py"]
    for document in documents:
        assert document.text.encode() == (tmp_path / document.path).read_bytes()
        assert document.size == len(document.text.encode())


def test_the_fingerprint_follows_names_and_contents():
    first, second = SourceFile("a.py", "xy", 2), SourceFile("b.py", "z", 1)
    prints = [
        fingerprint((first, second)),
        fingerprint((first, SourceFile("c.py", "z", 1))),
        fingerprint((first, SourceFile("b.py", "w", 1))),
        fingerprint((first,)),
    ]
    assert len(set(prints)) == 4


def test_the_standard_library_is_there():
    documents = read_files(stdlib_folder())
    assert len(documents) > 400
    assert sum(document.size for document in documents) > 8e6
    assert 10 < sum(document.held_out for document in documents) < 60


def test_a_corpus_too_small_to_split_is_refused(tmp_path: Path):
    (tmp_path / "os.py").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"1 to train on and 0 held out"):
        stdlib_corpora(tmp_path)


def test_reading_goes_on_from_any_file(root: Path):
    (part,) = stdlib_corpora(root)[0].parts
    whole = list(part.read())
    assert whole[-1][1] == 1.0
    assert list(part.read(whole[4][0])) == whole[5:]
