"""Measures what quantization costs: a model's perplexity and task accuracy in several storage types and in float32.

    python scripts/price_quantization.py smollm2.gguf FOLDER [characters] [questions]

FOLDER keeps the quantized models and the scores, so an interrupted run can be continued. `characters` is the length of
the text for the perplexity, and `questions` the number of questions for the accuracy. The text and the questions come
from Python's help topics (`pydoc_data`): a question is a sentence, and its two choices are the next sentence and a
sentence from elsewhere in the same topic. AWQ and GPTQ calibrate on 32 rows of the standard library's source. The
script takes about 40 minutes on two cores for SmolLM2-135M. docs/benchmarks/quantization.md has a table of results.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

INT4 = ("quantization=int4", "weight_block_size=[32,1]")
FORMS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "int8": ("quantization=int8",),
    "int4 in groups of 32": INT4,
    "int4 in groups of 32, GPTQ": (*INT4, "weight_quantization_algorithm=gptq", "calibration_rows=32"),
    "int4 in groups of 32, AWQ": (*INT4, "weight_quantization_algorithm=awq", "calibration_rows=32"),
    "nf4 in groups of 32": ("quantization=nf4", "weight_block_size=[32,1]"),
}
LENGTH = "max_target_length=512"


def main() -> None:
    """Prints a Markdown table with a row for each entry of FORMS."""
    model, folder = sys.argv[1], Path(sys.argv[2]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(folder, *(int(word) for word in sys.argv[3:5]))
    print("| stored as | perplexity | against float32 | next sentence | standard error | seconds to quantize |")
    print("|---|---|---|---|---|---|")
    first = None
    for form, keys in FORMS.items():
        place = folder / re.sub(r"\W+", "_", form)
        seconds = quantized(model, place, keys) if keys else None
        scores = scores_of(str(place) if keys else model, folder, f"scores_{place.name}")
        perplexity, (right, error) = scores["perplexity"][0], scores["accuracy"]
        first = first or perplexity
        more = f"{perplexity / first - 1:+.1%}" if keys else ""
        cells = f"{perplexity:.2f}", more, f"{right:.3f}", f"{error:.3f}", "" if seconds is None else f"{seconds:.0f}"
        print(f"| {form} | {' | '.join(cells)} |", flush=True)


def write_tasks(folder: Path, characters: int = 80_000, questions: int = 200) -> None:
    """Writes the evaluation tasks text.yml (perplexity) and next.jsonl (questions)."""
    (folder / "text.txt").write_text("\n".join(topics.values())[:characters])
    task = {"kind": "text", "dataset_type": "grain", "grain_file_type": "text", "context": 512, "joined": True}
    (folder / "text.yml").write_text(json.dumps(task | {"grain_train_files": str(folder / "text.txt")}))
    draw = random.Random(0)
    sentences = [re.findall(r"[A-Z][^.`]{40,110}\.(?=\s)", re.sub(r"\s+", " ", text)) for text in topics.values()]
    rows = []
    for each in draw.choices([found for found in sentences if len(found) > 8], k=questions):
        i = draw.randrange(3, len(each))
        other = draw.choice(each[: i - 3] + each[i + 1 :])
        rows.append({"question": each[i - 1], "choices": [each[i], other], "answer": 0})
    (folder / "next.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def quantized(model: str, place: Path, keys: tuple[str, ...]) -> float:
    """Writes the quantized model to the folder `place`, unless an earlier run did. Returns the seconds that it took."""
    kept = place.with_suffix(".seconds")
    if not kept.exists():
        began = time.monotonic()
        run("quantize", model, str(place), *keys, LENGTH)
        kept.write_text(str(time.monotonic() - began))
    return float(kept.read_text())


def scores_of(model: str, folder: Path, name: str) -> dict[str, tuple[float, float]]:
    """Returns each metric with its standard error. Evaluates the model unless an earlier run did."""
    results = folder / name / "results.json"
    if not results.exists():
        tasks = f"tasks={folder / 'text.yml'},{folder / 'next.jsonl'}"
        run("evaluate", model, tasks, f"output={results.parent}", "per_device_batch_size=8", LENGTH)
    return {score["metric"]: (score["value"], score["error"]) for score in json.loads(results.read_text())}


def run(program: str, *words: str) -> None:
    """Runs one of the trainer's programs, with its output on standard error."""
    command = [sys.executable, "-m", f"trainer.{program}", *words]
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"HF_HUB_OFFLINE": "1"})


if __name__ == "__main__":
    main()
