"""Measures multi-token prediction on this machine and prints a Markdown report.

    python scripts/benchmark_mtp.py [SEED ...] > docs/benchmarks/multi-token-prediction.md

Measures the cost of a step of the default model with 0, 1 and 2 prediction modules (mtp_num_layers), timed alternately.
For each seed, trains the default run with one module and without, and reports the final evaluations in bits per byte.
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

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from benchmark_default import batch_of, built

ROUNDS, STEPS, MODULES = 5, 5, (0, 1, 2)
SCALE = 0.3


def prepared(modules: int):
    """Returns a compiled step, its state, its batch, its model FLOPs, and the number of parameters."""
    run = built(mtp_num_layers=modules)
    flops = run.flops_per_token * run.rows * run.config.max_target_length
    return run.compile(), [run.init()], batch_of(run), flops, run.parameters


def report_cost() -> None:
    """Prints the table of costs: CPU seconds of all threads, which other programs on the machine hardly affect."""
    runs = {modules: prepared(modules) for modules in MODULES}
    seconds: dict[int, list[float]] = {modules: [] for modules in MODULES}
    for _ in range(ROUNDS):
        for modules, (step, state, batch, _, _) in runs.items():
            for _ in range(STEPS):
                started = time.process_time()
                state[0], metrics = step(state[0], batch, ())
                jax.block_until_ready((state[0], metrics))
                seconds[modules].append(time.process_time() - started)
    print("| modules | parameters | model FLOPs of a step | ratio | processor time of a step, ms | ratio |")
    print("|---|---|---|---|---|---|")
    base = statistics.median(seconds[0])
    for modules, (_, _, _, flops, parameters) in runs.items():
        median = statistics.median(seconds[modules])
        ratios = f"{flops / 1e9:.2f} G | {flops / runs[0][3]:.2f} | {1000 * median:.0f} | {median / base:.2f}"
        print(f"| {modules} | {parameters:,} | {ratios} |")


def trained(seed: int, modules: int, folder: Path) -> dict:
    """Trains the default run, and returns its last evaluation."""
    name = f"{seed}-{modules}"
    keys = {"run_name": name, "init_weights_seed": seed, "data_shuffle_seed": seed, "enable_checkpointing": False}
    keys |= {"base_output_directory": folder, "prompt": "", "mtp_num_layers": modules}
    keys |= {"mtp_loss_scaling_factor": SCALE, "mtp_eval_target_module": 1} if modules else {}
    words = [f"{key}={value}" for key, value in keys.items()]
    subprocess.run([sys.executable, "-m", "trainer.train", "base.yml", *words], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval_loss" in row][-1]


def report_training(seeds: list[int]) -> None:
    """Prints the table of trained runs."""
    print(f"| seed | bits per byte without | with a module, mtp_loss_scaling_factor={SCALE} | its acceptance rate |")
    print("|---|---|---|---|")
    differences = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            plain, module = (trained(seed, modules, Path(folder)) for modules in (0, 1))
            bits = [row["eval_bits_per_byte"] for row in (plain, module)]
            differences.append(bits[1] - bits[0])
            print(f"| {seed} | {bits[0]:.4f} | {bits[1]:.4f} | {module['eval_mtp_acceptance_rate']:.3f} |", flush=True)
    print(f"\nMean difference: {statistics.mean(differences):+.4f} bits per byte.")


def main() -> None:
    """Prints the report."""
    seeds = list(map(int, sys.argv[1:]))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print("# Multi-token prediction\n")
    print(
        f"`python scripts/benchmark_mtp.py {' '.join(sys.argv[1:])}`, commit {commit}, {time.strftime('%Y-%m-%d')}; "
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, JAX {jax.__version__}.\n"
    )
    report_cost()
    if seeds:
        print()
        report_training(seeds)


if __name__ == "__main__":
    main()
