"""The task of docs/guides/grpo.md and scripts/benchmark_grpo.py: sums of two numbers from 0 to 99.

    python scripts/sums.py FOLDER

The command writes FOLDER/train.jsonl with 8,000 of the 10,000 pairs of numbers and FOLDER/held-out.jsonl with the rest.
A hash determines the order of the pairs. A line is {"prompt": "83+66=", "answer": "149"}.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

TRAINED = 8000


def write(folder: Path) -> None:
    """Creates `folder` and writes the files into it."""
    prompts = [f"{a}+{b}=" for a in range(100) for b in range(100)]
    prompts.sort(key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", prompts[:TRAINED]), ("held-out", prompts[TRAINED:])):
        lines = [{"prompt": prompt, "answer": str(sum(map(int, prompt[:-1].split("+"))))} for prompt in part]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Returns 1 for each completion that equals its answer, otherwise 0."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    write(Path(sys.argv[1]))
