"""Measures tokens per second of both data pipelines on one core: `taskset -c 0 python scripts/benchmark_data.py`.

The documents are the sources of the standard library, written to a temporary folder in each file format. The script
measures CPU time, so that other work on the machine does not count. It prints the table of docs/benchmarks/data.md.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainer.config.load import load
from trainer.data.dataset import Dataset, open_dataset
from trainer.data.stdlib import read_files, stdlib_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from megatron_files import write_indexed

LENGTH, ROWS, SECONDS, REPEATS = 2048, 8, 3.0, 3
KINDS = ("jsonl", "parquet", "arrayrecord", "text")
CASES = (
    ("jsonl", "concat_then_split"),
    ("jsonl", "first_fit"),
    ("jsonl", "best_fit"),
    ("parquet", "concat_then_split"),
    ("arrayrecord", "concat_then_split"),
    ("text", "concat_then_split"),
)


def write_files(folder: Path, kind: str) -> int:
    """Writes the corpus in a format: as 8 files, except for "text", which has one file per document. Returns the
    corpus's size in bytes."""
    folder.mkdir()
    files = read_files(stdlib_folder())
    for i, file in enumerate(files if kind == "text" else ()):
        (folder / f"{i:04}.text").write_bytes(file.text.encode())
    for i in range(8 if kind != "text" else 0):
        texts = [file.text for file in files[i::8]]
        path = folder / f"{i}.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        elif kind == "parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
        else:
            from array_record.python.array_record_module import ArrayRecordWriter
            from tensorflow_datasets.proto import tf_example_pb2

            writer = ArrayRecordWriter(str(path), "group_size:1")
            for text in texts:
                example = tf_example_pb2.Example()
                example.features.feature["text"].bytes_list.value.append(text.encode())
                writer.write(example.SerializeToString())
            writer.close()
    return sum(file.size for file in files)


def write_tokens(folder: Path) -> None:
    """Writes the tokens of the same documents as 8 indexed data sets of Megatron-LM."""
    tokenizer = open_files(folder, "jsonl", folder, data_pipeline="streaming")[0].tokenizer
    assert tokenizer is not None
    (folder / "mmap").mkdir()
    files = read_files(stdlib_folder())
    for i in range(8):
        documents = tokenizer.encode_many([file.text for file in files[i::8]])
        write_indexed(folder / "mmap" / str(i), [[[*ids, tokenizer.eos]] for ids in documents], "u2")


def open_files(folder: Path, kind: str, cache: Path, **keys: object) -> tuple[Dataset, float]:
    """Returns the dataset, and the CPU seconds to open it."""
    settings = {
        "dataset_type": "grain",
        "grain_file_type": kind,
        "grain_train_files": f"{folder / kind}/*",
        "data_cache_directory": cache,
        "max_target_length": LENGTH,
        "vocab_size": 8192,
        "tokenizer_path": folder / "tokenizer",
        "held_out_share": 0,
        "eval_interval": -1,
    }
    config = load([f"{key}={value}" for key, value in (settings | keys).items()]).config
    started = time.process_time()
    return open_dataset(config, lambda line: None), time.process_time() - started


def rate(dataset: Dataset) -> tuple[float, float, float]:
    """Returns the median rate of tokens that contribute to the loss, in millions per CPU second; the share of positions
    that these tokens fill; and the CPU seconds to resume."""
    stream = dataset.train_stream(rows=ROWS)
    _, position = next(stream)
    rates, tokens, places = [], 0, 0
    for _ in range(REPEATS):
        started, count = time.process_time(), 0
        while time.process_time() - started < SECONDS:
            batch, position = next(stream)
            count += int((batch["targets_segmentation"] != 0).sum())
            places += batch["targets"].size
        rates.append(count / (time.process_time() - started) / 1e6)
        tokens += count
    stream.close()
    started = time.process_time()
    stream = dataset.train_stream(position, rows=ROWS)
    next(stream)
    resumed = time.process_time() - started
    stream.close()
    return statistics.median(rates), tokens / places, resumed


def main() -> None:
    """Prints the table."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    cores = len(os.sched_getaffinity(0))
    print(f"`taskset -c 0 python scripts/benchmark_data.py`, commit {commit.stdout.strip()}, {cores} core ", end="")
    print(f"({platform.machine()}), Python {platform.python_version()}; rows of {LENGTH} tokens, {ROWS} a batch.\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = {kind: write_files(folder / kind, kind) for kind in KINDS}["jsonl"]
        # All cases use one tokenizer, which this call trains.
        open_files(folder, "jsonl", folder / "bpe", tokenizer_path="", data_pipeline="streaming")
        next(path for path in (folder / "bpe").iterdir() if path.is_dir()).rename(folder / "tokenizer")
        columns = ("files", "packing", "prepare, MB/s", "prepared, Mtok/s", "streaming, Mtok/s", "resume, s", "filled")
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for kind, packing in CASES:
            keys = {"grain_packing_type": packing}
            dataset, seconds = open_files(folder, kind, folder / f"cache-{kind}-{packing}", **keys)
            prepared, used, _ = rate(dataset)
            streaming, _, resumed = rate(open_files(folder, kind, folder, data_pipeline="streaming", **keys)[0])
            cells = [f"{size / seconds / 1e6:.1f}", f"{prepared:.1f}", f"{streaming:.2f}", f"{resumed:.2f}"]
            print(f"| {kind} | {packing} | {' | '.join(cells)} | {100 * used:.1f} % |", flush=True)
        write_tokens(folder)
        dataset, seconds = open_files(folder, "mmap", folder)
        read, used, resumed = rate(dataset)
        print(f"| mmap | none | {seconds:.2f} s to open | {read:.1f} | | {resumed:.2f} | {100 * used:.1f} % |")


if __name__ == "__main__":
    main()
