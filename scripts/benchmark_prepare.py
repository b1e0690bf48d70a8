"""Times trainer.prepare with different numbers of processes: `python scripts/benchmark_prepare.py [--mb 64]`.

The data are the sources of Python's standard library as JSONL, repeated until they have the given size. In the first
case, the data are one part, which one process tokenizes with all cores. In the others, the data are several parts,
which one, two or three processes tokenize. If the extra `beam` is installed, Beam's local runner is measured, too. The
cases run in turns, and each figure is the best of the rounds. CPU time includes all processes.
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainer.data.stdlib import read_files, stdlib_folder

CASES = {
    "one part": ("prepare_part_mib=0", "prepare_workers=1"),
    "parts, 1 process": ("prepare_part_mib=4", "prepare_workers=1"),
    "parts, 2 processes": ("prepare_part_mib=4", "prepare_workers=2"),
    "parts, 3 processes": ("prepare_part_mib=4", "prepare_workers=3"),
}
if importlib.util.find_spec("apache_beam"):
    beam = "beam=--runner=DirectRunner --direct_num_workers=2 --direct_running_mode=multi_processing"
    CASES["parts, Beam, 2 workers"] = ("prepare_part_mib=4", beam)


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=64, help="megabytes of text")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        documents = _write(Path(folder) / "data.jsonl", arguments.mb * 10**6)
        tokenizer = _prepared(Path(folder), "tokenizer", ("prepare_part_mib=0",))[0] / "tokenizer"
        times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in CASES}
        for i in range(arguments.rounds):
            for name, words in CASES.items():
                place, seconds, cpu = _prepared(Path(folder), f"{name} {i}", (*words, f"tokenizer_path={tokenizer}"))
                times[name].append((seconds, cpu, _rows(place)))
    print(f"{documents:,} documents, {arguments.mb} MB, {os.cpu_count()} cores")
    base = min(times["one part"])
    for name, found in times.items():
        seconds, _, rows = min(found)
        cpu = min(cpu for _, cpu, _ in found)
        print(
            f"{name:24} {rows:,} rows, {seconds:.1f} s, {rows / seconds:.0f} rows/s, {rows / cpu:.0f} rows/s of CPU, "
            f"{base[0] / seconds:.2f} times as fast as one part"
        )


def _write(path: Path, size: int) -> int:
    """Writes documents with at least `size` characters in total, and returns the number of documents."""
    files, written, count = read_files(stdlib_folder()), 0, 0
    with path.open("w", encoding="utf-8") as out:
        while written < size:
            for file in files:
                out.write(json.dumps({"text": f"# copy {count}\n{file.text}"}) + "\n")
                written, count = written + len(file.text), count + 1
    return count


def _prepared(folder: Path, name: str, words: tuple[str, ...]) -> tuple[Path, float, float]:
    """Prepares data. Returns the folder, the elapsed seconds, and the CPU seconds of all processes."""
    place = folder / name
    data = ("dataset_type=grain", "grain_file_type=jsonl", f"grain_train_files={folder}/data.jsonl")
    keys = ("max_target_length=512", "vocab_size=8192", "held_out_share=0", "eval_interval=-1")
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "trainer.prepare", *data, *keys, *words, f"out={place}"]
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return place, time.monotonic() - began, cpu


def _rows(place: Path) -> int:
    (folder,) = place.glob("train-*")
    return json.loads((folder / "meta.json").read_text(encoding="utf-8"))["rows"]


if __name__ == "__main__":
    main()
