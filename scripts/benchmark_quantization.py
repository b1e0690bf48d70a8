"""Trains the default model with each quantization recipe, and prints the evaluation losses as a Markdown table.

    python scripts/benchmark_quantization.py FOLDER [--steps N] [--recipes int8 fp8_full]

Each recipe runs with each of SEEDS, which determine the initial parameters and the order of the rows. Runs without
quantization are the reference. Each run has its own folder, and a complete run is not repeated.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from trainer import train

SEEDS = (0, 1, 2)
RECIPES = ("int8", "fp8_full", "int4")
FLOAT = ""


def loss(folder: Path, recipe: str, seed: int, steps: int) -> float:
    """Returns the loss of a run on all held-out rows after its last step. The run is trained first unless complete."""
    run = f"{recipe or 'float'}-seed{seed}-{steps}"
    metrics = folder / run / "metrics.jsonl"
    if not metrics.exists() or (found := _last(metrics, steps)) is None:
        keys = {"quantization": recipe, "init_weights_seed": seed, "data_shuffle_seed": seed}
        keys |= {"steps": steps, "eval_interval": steps, "enable_checkpointing": False, "prompt": ""}
        keys |= {"base_output_directory": folder, "run_name": run}
        train.main(["base.yml", *(f"{key}={value}" for key, value in keys.items())])
        found = _last(metrics, steps)
    assert found is not None, metrics
    return found


def _last(metrics: Path, steps: int) -> float | None:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return next((row["eval_loss"] for row in rows if "eval_loss" in row and row["step"] + 1 == steps), None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    words = parser.parse_args()
    losses = {
        recipe: [loss(words.folder, recipe, seed, words.steps) for seed in SEEDS] for recipe in (FLOAT, *words.recipes)
    }
    print(f"| `quantization` | loss, {len(SEEDS)} seeds | against float, each seed |")
    print("|---|---|---|")
    for recipe, found in losses.items():
        ratios = [100 * (ours / reference - 1) for ours, reference in zip(found, losses[FLOAT], strict=True)]
        spread = f"{statistics.mean(found):.4f} ({', '.join(f'{one:.4f}' for one in found)})"
        print(f"| {recipe or 'none'} | {spread} | {', '.join(f'{ratio:+.2f} %' for ratio in ratios)} |")


if __name__ == "__main__":
    main()
