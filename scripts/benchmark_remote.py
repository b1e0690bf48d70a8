"""Measures how long it takes to read a data set from a web server with a delay, relative to local files.

    taskset -c 0,1 python scripts/benchmark_remote.py

The documents are the sources of the standard library, in files of each format. Prints the table of
docs/benchmarks/data.md. The server runs on the same machine, and all figures of a row are from one run, so only the
ratios within a row are meaningful.
"""

import gzip
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmark_data import write_files

from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.data.sources import open_source

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from slow_server import SlowServer, served

KINDS = ("jsonl", "jsonl.gz", "parquet", "arrayrecord", "text")
DELAYS = (0.005, 0.05)  # the server's delays, in seconds before each answer


def measure(folder: Path, kind: str, files: str, name: str) -> tuple[float, float]:
    """Returns the seconds to read all documents, and the seconds to read them and prepare rows with the byte
    tokenizer."""
    keys = {
        "dataset_type": "grain",
        "grain_file_type": kind.removesuffix(".gz"),
        "grain_train_files": files,
        "data_cache_directory": folder / "cache" / f"{kind}-{name}",
        "tokenizer_type": "bytes",
        "vocab_size": 512,
        "max_target_length": 2048,
        "held_out_share": 0,
        "prepare_workers": 1,
        "eval_interval": -1,
    }
    config = load([f"{key}={value}" for key, value in keys.items()]).config
    shutil.rmtree(folder / "cache", ignore_errors=True)
    started = time.perf_counter()
    for corpus in open_source(config).train:
        for _ in corpus.records():
            pass
    read = time.perf_counter() - started
    shutil.rmtree(folder / "cache", ignore_errors=True)
    started = time.perf_counter()
    open_dataset(config, lambda line: None)
    return read, time.perf_counter() - started


def row(folder: Path, server: SlowServer, kind: str) -> str:
    """Returns the row of a format."""
    size = sum(path.stat().st_size for path in (folder / kind).iterdir())
    end = "*" if kind == "text" else f"*.{kind}"
    local = measure(folder, kind, f"{folder / kind}/{end}", "local")
    cells = [f"{local[0]:.2f}", f"{local[1]:.1f}"]
    for delay in DELAYS:
        server.delay, server.sent = delay, 0
        there = measure(folder, kind, f"{server.url}/{kind}/{end}", "remote")
        cells += [f"{there[0]:.2f}, {there[0] / local[0]:.1f}", f"{there[1]:.1f}, {there[1] / local[1]:.2f}"]
    return f"| {kind} | {' | '.join(cells)} | {server.sent / 2 / size:.3f} | {len(list((folder / kind).iterdir()))} |"


def main() -> None:
    """Prints the table."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    print(f"commit {commit.stdout.strip()}, {platform.machine()}, Python {platform.python_version()}\n")
    columns = ["format", "local: read, s", "prepare, s"]
    for delay in DELAYS:
        columns += [f"{1000 * delay:.0f} ms: read, s, ratio", "prepare, s, ratio"]
    columns += ["bytes sent / bytes of files", "files"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in KINDS:
            write_files(folder / kind, kind.removesuffix(".gz"))
        for path in (folder / "jsonl.gz").iterdir():
            Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        with served(folder) as server:
            for kind in KINDS:
                print(row(folder, server, kind), flush=True)


if __name__ == "__main__":
    main()
