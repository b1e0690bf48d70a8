"""Measures the default run on this machine and prints a Markdown report.

    python scripts/benchmark_default.py > docs/benchmarks/default-run.md

The step and the matrix-multiply peak are timed alternately, so that other load affects both. FLOPs are counted as in
models/flops.py: 6 per token for each parameter of a matrix product, half of the full score matrix for causal attention,
and none for recomputation.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from trainer.config.flags import COMBINATIONS, flags_of
from trainer.config.load import load
from trainer.data.batches import train_batch
from trainer.data.synthetic import SyntheticRows
from trainer.models.flops import flops_per_token
from trainer.training.batches import placed
from trainer.training.build import build

ROUNDS, STEPS = 5, 20


def built(*args, **overrides):
    """Returns a run with base.yml's defaults, on synthetic rows, which need no preparation."""
    overrides = {"dataset_type": "synthetic", "eval_interval": -1} | overrides
    return build(load([*args, *(f"{k}={v}" for k, v in overrides.items())]).config, jax.devices())


def batch_of(run):
    """Returns one batch on the devices."""
    source = SyntheticRows(run.config.max_target_length, run.config.vocab_size, seed=0)
    return placed(run, train_batch(source, 0, run.rows, seed=0, shuffle=False))


def compile_seconds(run) -> tuple[float, float]:
    """Returns two times in seconds: to trace and lower the step, and to compile it."""
    started = time.perf_counter()
    lowered = run.step.lower(*run.abstract_args())
    traced = time.perf_counter()
    lowered.compile()
    return traced - started, time.perf_counter() - traced


def step_and_peak() -> tuple[float, float, float]:
    """Returns the median seconds of a step, its model FLOP/s, and the float32 matrix-multiply peak in FLOP/s."""
    run = built()
    step, state, batch = run.compile(), run.init(), batch_of(run)
    size = 2048
    matrix = jnp.ones((size, size))
    multiply = jax.jit(jnp.matmul)
    multiply(matrix, matrix).block_until_ready()
    seconds, peaks = [], []
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            started = time.perf_counter()
            state, metrics = step(state, batch, ())
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - started)
        for _ in range(5):
            started = time.perf_counter()
            multiply(matrix, matrix).block_until_ready()
            peaks.append(2 * size**3 / (time.perf_counter() - started))
    step_seconds = statistics.median(seconds)
    tokens = run.rows * run.config.max_target_length
    return step_seconds, flops_per_token(run.config) * tokens / step_seconds, statistics.median(peaks)


def host_seconds(name: str) -> float:
    """Returns the median seconds of a whole step of a model so small that only the host's work remains."""
    tiny = {"base_emb_dim": 2, "base_mlp_dim": 2, "base_num_query_heads": 1, "base_num_kv_heads": 1, "head_dim": 2}
    tiny |= {"vocab_size": 2, "max_target_length": 2, "per_device_batch_size": 1}
    run = built(**flags_of(name), **tiny)
    step, state, batch = run.compile(), run.init(), batch_of(run)
    seconds = []
    for _ in range(500):
        started = time.perf_counter()
        state, metrics = step(state, batch, ())
        jax.device_get(metrics)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def seconds_to(marker: str | None, *args: str) -> float:
    """Returns the seconds from the start of trainer.train to its first line that begins with `marker`, or to its end if
    there is no such line."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [sys.executable, "-m", "trainer.train", *args]
        with subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if marker is not None and line.startswith(marker):
                    break
            else:
                process.wait()
            elapsed = time.perf_counter() - started
            process.kill()
        return elapsed


def main() -> None:
    """Prints the report."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    print("# The default run\n")
    print(f"`python scripts/benchmark_default.py`, commit {commit.strip()}, {time.strftime('%Y-%m-%d')}; ", end="")
    print(
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, JAX {jax.__version__}.\n"
    )

    print("| from the start of the process | seconds, median of 3 |\n|---|---|")
    seconds_to("completed step: 0", "steps=1", "eval_interval=-1")  # prepares the data for the measurements
    for what, marker, args in (
        ("to the first step, data prepared, no compilation cache", "completed step: 0", ["eval_interval=-1"]),
        ("to the end of a configuration error", None, ["learning_rat=1"]),
        ("to the end of --help", None, ["--help"]),
    ):
        print(f"| {what} | {statistics.median(seconds_to(marker, *args) for _ in range(3)):.2f} |")

    seconds, flops, peak = step_and_peak()
    run = built()
    tokens = run.rows * run.config.max_target_length
    print(f"\nA step of the default model takes {1e3 * seconds:.0f} ms: {tokens / seconds:,.0f} tokens/s, ", end="")
    print(
        f"{flops / 1e9:.0f} GFLOP/s of model FLOPs, {100 * flops / peak:.0f} % of the {peak / 1e9:.0f} GFLOP/s ", end=""
    )
    print("that a float32 matrix product of 2048 x 2048 reaches here.\n")

    print("| combination | trace and lower, s | compile, s | host time per step, ms |\n|---|---|---|---|")
    for name in COMBINATIONS:
        lower, compiled = compile_seconds(built(**flags_of(name)))
        print(f"| {name} | {lower:.2f} | {compiled:.2f} | {1e3 * host_seconds(name):.2f} |")

    print("\n| layers | loop | trace and lower, s | compile, s |\n|---|---|---|---|")
    for layers in (8, 80):
        lower, compiled = compile_seconds(built(base_num_decoder_layers=layers))
        print(f"| {layers} | scanned | {lower:.2f} | {compiled:.2f} |")
    lower, compiled = compile_seconds(built(base_num_decoder_layers=8, scan_layers=False))
    print(f"| 8 | unrolled | {lower:.2f} | {compiled:.2f} |")


if __name__ == "__main__":
    main()
