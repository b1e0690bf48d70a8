"""Corpora that the tests of data share."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sample_data import write_corpus


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 files of unequal length, some with non-ASCII bytes and Windows line ends, some in a subfolder."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "sub").mkdir()
    for i in range(60):
        text = "".join(f"def f{i}_{j}(x):\r\n    return 'ä€😀' * x + {i * j}\n" for j in range(1 + i % 7))
        folder = root / "sub" if i % 3 == 0 else root
        (folder / f"module{i}.py").write_bytes(text.encode())
    return root


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """corpora(kind): returns a folder of 30 documents in that format."""
    base = tmp_path_factory.mktemp("formats")

    def made(kind: str) -> Path:
        return base / kind if (base / kind).exists() else write_corpus(base / kind, kind)

    return made
