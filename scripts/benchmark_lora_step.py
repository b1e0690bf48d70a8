"""Compares the time of steps with adapters with that of full training on this machine, and prints the ratios.

    python scripts/benchmark_lora_step.py [--steps N] [key=value ...]

Full training and training with each kind of adapter run in turns, step by step, on the same synthetic rows.
"""

import statistics
import sys
import time

import jax
from benchmark_lora import LORA

from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.training.batches import placed
from trainer.training.build import build

WAYS = {
    "full": [],
    "LoRA": LORA,
    "QLoRA, int8": [*LORA, "lora_weight_qtype=int8", "lora_tile_size=64"],
    "QLoRA, nf4": [*LORA, "lora_weight_qtype=nf4", "lora_tile_size=64"],
}


def main() -> None:
    """Runs the command line."""
    words = sys.argv[1:]
    steps = int(words.pop(words.index("--steps") + 1)) if "--steps" in words else 30
    keys = ["dataset_type=synthetic", "eval_interval=-1", *(word for word in words if "=" in word)]
    runs = {name: build(load(["base.yml", *keys, *own]).config, jax.devices()) for name, own in WAYS.items()}
    programs = {name: (run.compile(), run.init()) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    first = next(iter(runs.values()))
    stream = open_dataset(first.config, print).train_stream(rows=first.rows)
    for _ in range(steps):
        batch, _ = next(stream)
        for name, (step, state) in programs.items():
            on_devices, begun = placed(runs[name], batch), time.perf_counter()
            state, _ = jax.block_until_ready(step(state, on_devices, ()))
            seconds[name].append(time.perf_counter() - begun)
            programs[name] = step, state
    for name, found in seconds.items():
        ratios = [own / full for own, full in zip(found, seconds["full"], strict=True)]
        print(f"{name}: {1000 * statistics.median(found):.1f} ms, {statistics.median(ratios):.2f} of full training")


if __name__ == "__main__":
    main()
