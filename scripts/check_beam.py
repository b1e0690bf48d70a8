"""Compares data prepared with Apache Beam and without: `python scripts/check_beam.py`. Needs the extra `beam`.

Prepares the sources of Python's standard library as JSONL in parts, and drops duplicates. Each of Beam's local runners
must write the same bytes as a single process, and must name the line of a record that is not JSON.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainer.data.stdlib import read_files, stdlib_folder

RUNNERS = (
    "--runner=FnApiRunner",
    "--runner=DirectRunner --direct_num_workers=2 --direct_running_mode=multi_processing",
)
KEYS = (
    *("dataset_type=grain", "grain_file_type=jsonl", "tokenizer_type=bytes", "vocab_size=257"),
    *("max_target_length=512", "prepare_part_mib=2", "drop_duplicates=true", "prepare_workers=1"),
)


def main() -> None:
    """Prints a line for each runner; exits with code 1 if a runner fails a check."""
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [json.dumps({"text": file.text}) for file in read_files(stdlib_folder())]
        (folder / "good.jsonl").write_text("\n".join(texts + texts[:100]), encoding="utf-8")
        (folder / "bad.jsonl").write_text("\n".join([*texts, "{"]), encoding="utf-8")
        code, seconds, _ = _prepared(folder, "good.jsonl", "local", [])
        print(f"one process: {seconds:.1f} s")
        for i, runner in enumerate(RUNNERS):
            code, seconds, _ = _prepared(folder, "good.jsonl", f"beam{i}", [f"beam={runner}"])
            same = code == 0 and _files(folder / "local") == _files(folder / f"beam{i}")
            bad, _, errors = _prepared(folder, "bad.jsonl", f"bad{i}", [f"beam={runner}"])
            named = bad == 2 and f"bad.jsonl, line {len(texts) + 1}, is not JSON" in errors
            wrong += not (same and named)
            print(f"{runner}: {seconds:.1f} s, {'equal' if same else 'DIFFERENT'}, {'' if named else 'NOT '}named")
    sys.exit(1 if wrong else 0)


def _prepared(folder: Path, file: str, out: str, words: list[str]) -> tuple[int, float, str]:
    began = time.monotonic()
    command = [sys.executable, "-m", "trainer.prepare", *KEYS, f"grain_train_files={folder / file}", *words]
    done = subprocess.run([*command, f"out={folder / out}"], capture_output=True, text=True, check=False)
    return done.returncode, time.monotonic() - began, done.stderr


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


if __name__ == "__main__":
    main()
