"""Measures the cost of QK-Clip per step with each attention op that runs on a CPU, and prints a Markdown table.

    python scripts/benchmark_qk_clip.py

The programs of one table row run in turns, a few steps each. The figures are ratios of CPU seconds (of all threads), so
other processes on the machine hardly affect them. Fused kernels do not run on a CPU; docs/benchmarks/qk-clip.md has the
compiler's figures for splash.
"""

import os
import statistics
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from benchmark_default import batch_of, built

ROUNDS, STEPS = 4, 2
CLIPS: dict[str, dict[str, Any]] = {
    "without": {},
    "every step": {"use_qk_clip": True},
    "every 10th": {"use_qk_clip": True, "qk_clip_interval": 10},
}
# (op, tokens, rows). With base.yml's widths, attention is a small part of a step at 128 tokens, a large part at 2048.
CASES = [("dot_product", 128, 8), ("dot_product", 1024, 1), ("blockwise", 1024, 1), ("blockwise", 2048, 1)]


def cpu_seconds(op: str, length: int, rows: int) -> dict[str, list[float]]:
    """Returns the CPU seconds per step in each round, by name in CLIPS."""
    sizes = {"attention": op, "max_target_length": length, "per_device_batch_size": rows}
    runs = {name: built(**sizes, **keys) for name, keys in CLIPS.items()}
    steps = {name: run.compile() for name, run in runs.items()}
    states = {name: run.init() for name, run in runs.items()}
    batches = {name: batch_of(run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(ROUNDS + 1):
        for name, step in steps.items():
            started = time.process_time()
            for _ in range(STEPS):
                states[name], metrics = step(states[name], batches[name], ())
                jax.block_until_ready(metrics)
            if i:  # the first round warms up; in it, the case "every 10th" takes its only sample
                seconds[name].append((time.process_time() - started) / STEPS)
    return seconds


def main() -> None:
    """Prints the table."""
    print("| op | tokens | CPU s per step | with QK-Clip | between two samples |\n|---|---|---|---|---|")
    for op, length, rows in CASES:
        seconds = cpu_seconds(op, length, rows)
        base = seconds["without"]
        ratios = {name: statistics.median(b / a for a, b in zip(base, seconds[name], strict=True)) for name in CLIPS}
        print(
            f"| {op} | {rows} x {length} | {statistics.median(base):.2f} | {ratios['every step']:.3f} "
            f"| {ratios['every 10th']:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
