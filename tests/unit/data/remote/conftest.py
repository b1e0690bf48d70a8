"""Web servers with files in every format, and settings with which requests fail quickly."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_cases import KINDS, ROWS
from sample_data import write_records
from slow_server import SlowServer, served

from trainer.runtime import attempts, remote


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
