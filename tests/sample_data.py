"""Small corpora in every format, and functions that open them."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.load import load
from trainer.data.dataset import Dataset, open_dataset
from trainer.runtime.crc32c import masked_crc32c

LENGTH, VOCAB = 32, 300


def document(i: int) -> str:
    """Returns the text of document i, 12 to 140 characters, some not ASCII. Some are longer than a row of tokens."""
    return f"document {i}: " + "".join(f"ä{i * k % 97} " for k in range(i * 7 % 29))


def say_nothing(line: str) -> None:
    pass


def config_of(cache: Path, **keys: Any):
    """Returns a configuration as from a command line. Keys that the data tests share have small values."""
    shared = {"max_target_length": LENGTH, "vocab_size": VOCAB, "data_cache_directory": cache, "eval_interval": -1}
    words = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in (shared | keys).items()
    ]
    return load(words).config


def opened(cache: Path, **keys: Any) -> Dataset:
    """Returns the dataset of `config_of(cache, **keys)`."""
    return open_dataset(config_of(cache, **keys), say_nothing)


def example(**values: Any) -> bytes:
    """Returns a tf.train.Example of text and lists of integers, written by hand."""

    def varint(number: int) -> bytes:
        parts = []
        number &= (1 << 64) - 1
        while number > 0x7F:
            parts.append(number & 0x7F | 0x80)
            number >>= 7
        return bytes([*parts, number])

    def field(number: int, data: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(data)) + data

    entries = b""
    for name, value in values.items():
        if isinstance(value, str):
            feature = field(1, field(1, value.encode()))
        else:
            feature = field(3, field(1, b"".join(map(varint, value))))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def write_records(path: Path, kind: str, rows: list[dict[str, Any]]) -> None:
    """Writes `rows` to a file whose format is `kind`, a value of grain_file_type."""
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    elif kind == "arrayrecord":
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(path), "group_size:1")
        for row in rows:
            writer.write(example(**row))
        writer.close()
    elif kind == "tfrecord":
        write_tfrecords(path, [example(**row) for row in rows])
    else:
        raise AssertionError(kind)


def write_tfrecords(path: Path, records: list[bytes]) -> None:
    """Writes a TFRecord file."""

    def summed(data: bytes) -> bytes:
        return data + struct.pack("<I", masked_crc32c(data))

    path.write_bytes(b"".join(summed(struct.pack("<Q", len(data))) + summed(data) for data in records))


def write_corpus(folder: Path, kind: str, count: int = 30, files: int = 3) -> Path:
    """Writes `count` documents to `files` files in a new folder, or one document per file if `kind` is text."""
    folder.mkdir(parents=True)
    if kind == "text":
        for i in range(count):
            (folder / f"{i:03}.text").write_text(document(i))
        return folder
    for j in range(files):
        rows = [{"text": document(i), "number": [i, i + 1]} for i in range(j, count, files)]
        write_records(folder / f"{j}.{kind}", kind, rows)
    return folder


def write_tfds(folder: Path, count: int = 20) -> None:
    """Writes a TFDS dataset `tiny/made:1.2.3` with the splits train and validation."""
    import tensorflow_datasets as tfds

    class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        code_path = None
        VERSION = tfds.core.Version("1.2.3")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="made", version="1.2.3")]

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "label": np.int64})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(0, count), "validation": self._generate_examples(count, count + 5)}

        def _generate_examples(self, first, last):
            for i in range(first, last):
                yield i, {"text": document(i), "label": i}

    tfds.display_progress_bar(False)
    builder = Tiny(data_dir=folder, file_format="array_record", config="made")
    builder.download_and_prepare()
    assert Path(builder.data_dir) == folder / "tiny" / "made" / "1.2.3"
