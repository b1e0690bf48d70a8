"""Records in every format for a web server, and helpers that open them."""

from pathlib import Path
from typing import Any

from sample_data import config_of

from trainer.data.sources import open_source
from trainer.runtime.copies import Copies

KINDS = ("jsonl", "jsonl.gz", "text", "tfrecord", "parquet", "arrayrecord")


COPIED = ("jsonl.gz", "arrayrecord")


ROWS = [
    {"text": f"{i} " + "".join(f"{i * k * k % 9973} " for k in range(60 + i % 90)), "more": f"{i % 7} " * 100}
    for i in range(300)
]


KEYS = {"dataset_type": "grain", "tokenizer_type": "bytes", "held_out_share": 0}


def keys_of(kind: str, files: Any, **more: Any) -> dict[str, Any]:
    return KEYS | {"grain_file_type": kind.removesuffix(".gz"), "grain_train_files": files} | more


def parts_of(cache: Path, kind: str, files: Any, **more: Any) -> list[Any]:
    (corpus,) = open_source(config_of(cache, **keys_of(kind, files, **more))).train
    return list(corpus.parts)


def read(part: Any, cursor: int = 0) -> list[tuple[int, float, tuple]]:
    return [(at, share, record.values) for at, share, record in part.read(cursor)]


def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path / "copies", 1 << 30)
