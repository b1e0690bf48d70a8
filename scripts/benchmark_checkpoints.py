"""Measures checkpoints on this machine and prints a Markdown report.

    python scripts/benchmark_checkpoints.py > docs/benchmarks/checkpoints.md

One process saves a state of 500 MB to the system's temporary folder and restores it; reads may come from the page
cache. Resuming is timed with the default model on synthetic rows, from the start of the process to its first step.
"""

import argparse
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from trainer.backends.base import TrainTree
from trainer.checkpoint.manager import CheckpointManager, inspect, restore
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.load import load

LEAVES, SIDE = 8, 4000  # eight float32 matrices of 64 MB each
MEGABYTES = LEAVES * SIDE**2 * 4 / 1e6
SETTINGS = ["base.yml", "dataset_type=synthetic", "async_checkpointing=true", "max_num_checkpoints_to_keep=1"]
STEP = "completed step: "


def timed(act: Callable[..., object], *arguments: object) -> float:
    """Returns the seconds that `act(*arguments)` takes."""
    started = time.perf_counter()
    act(*arguments)
    return time.perf_counter() - started


def large_state(rounds: int) -> dict[str, list[float]]:
    """Returns a dict from each part of saving and restoring to the seconds that it takes in each round."""
    key = jax.random.key(0)
    params = {f"kernel_{i}": jax.random.normal(jax.random.fold_in(key, i), (SIDE, SIDE)) for i in range(LEAVES)}
    tree = TrainTree(jnp.zeros((), jnp.int32), jax.block_until_ready(params), (), {})
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    seconds: dict[str, list[float]] = {name: [] for name in ("blocked", "committed", "summed", "restored")}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            with CheckpointManager(Path(folder), load(SETTINGS).config, print) as manager:
                started = time.perf_counter()
                manager.save(1, tree, Sidecar("", 0, "", {}), {})
                seconds["blocked"].append(time.perf_counter() - started)
                manager.wait()
                seconds["committed"].append(time.perf_counter() - started)
                path = manager.path(1)
            seconds["summed"].append(timed(inspect, path))
            seconds["restored"].append(timed(lambda path: jax.block_until_ready(restore(path, abstract)), path))
            shutil.rmtree(path)
    return seconds


def resuming(rounds: int) -> dict[str, list[float]]:
    """Returns a dict with lists of seconds: "new" from the start of a new run to its first step, "exit" from SIGTERM to
    the exit, and "resumed" from the start of the resumed run to its first step."""
    seconds: dict[str, list[float]] = {name: [] for name in ("new", "exit", "resumed")}
    command = [sys.executable, "-m", "trainer.train", "dataset_type=synthetic", "steps=100000", "run_name=x"]
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("new", "resumed"):
                started = time.perf_counter()
                with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
                    assert process.stdout is not None
                    steps = (line for line in process.stdout if line.startswith(STEP))
                    next(steps)
                    seconds[name].append(time.perf_counter() - started)
                    for _ in range(9):
                        next(steps)
                    process.send_signal(signal.SIGTERM)
                    signalled = time.perf_counter()
                    process.stdout.read()
                    assert process.wait() == 143
                seconds["exit"].append(time.perf_counter() - signalled)
    return seconds


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    print("# Checkpoints\n")
    print(f"`python scripts/benchmark_checkpoints.py --rounds {rounds}`, commit {commit.strip()}, ", end="")
    print(f"{time.strftime('%Y-%m-%d')}; {os.cpu_count()} cores ({platform.machine()}), ", end="")
    print(f"Python {platform.python_version()}, JAX {jax.__version__}, load average {os.getloadavg()[0]:.1f} ", end="")
    print("at the start.\n")

    large = {name: statistics.median(values) for name, values in large_state(rounds).items()}
    print(f"| a state of {MEGABYTES:.0f} MB, one device | seconds, median of {rounds} | MB/s |\n|---|---|---|")
    print(f"| a save blocks the loop | {large['blocked']:.3f} | |")
    for name, what in (
        ("committed", "a save until it is committed, including checksums"),
        ("summed", "comparing the checksums before a restore"),
        ("restored", "the restore itself"),
    ):
        print(f"| {what} | {large[name]:.2f} | {MEGABYTES / large[name]:,.0f} |")

    small = {name: statistics.median(values) for name, values in resuming(rounds).items()}
    print(f"\n| the default model, from the start of the process | seconds, median of {rounds} |\n|---|---|")
    print(f"| to the first step of a new run | {small['new']:.2f} |")
    print(f"| to the first new step when resuming | {small['resumed']:.2f} |")
    print(f"| from SIGTERM to the exit with code 143 | {small['exit']:.2f} |")
    print(f"| from SIGTERM to the first new step of the same command | {small['exit'] + small['resumed']:.2f} |")


if __name__ == "__main__":
    main()
