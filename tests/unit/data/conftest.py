"""A corpus of generated files, and what is prepared from it."""

from pathlib import Path

import pytest

from trainer.data.stdlib import Prepared, open_corpus

LENGTH, VOCAB = 32, 300


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 files of unequal length, some with bytes outside ASCII and Windows line ends, some below a folder."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "sub").mkdir()
    for i in range(60):
        text = "".join(f"def f{i}_{j}(x):\r\n    return 'ä€😀' * x + {i * j}\n" for j in range(1 + i % 7))
        folder = root / "sub" if i % 3 == 0 else root
        (folder / f"module{i}.py").write_bytes(text.encode())
    return root


@pytest.fixture(scope="session")
def prepared(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Opened a second time, so that it comes from the cache."""
    folder = tmp_path_factory.mktemp("cache")
    open_corpus(root, folder, VOCAB, LENGTH, lambda line: None)
    return open_corpus(root, folder, VOCAB, LENGTH, lambda line: pytest.fail(f"prepared twice: {line}"))
