"""Compares the estimated time of a step with the measured time on CPU devices and prints a Markdown report.

    python scripts/benchmark_estimate.py > docs/benchmarks/estimate.md

The machine's peak figures and the steps are measured alternately, so that other load slows both. Simulated devices
share the machine: each has an equal share of the peak FLOP/s and of the memory bandwidth. Collectives use the memory
bandwidth, too.
"""

import os
import platform
import statistics
import subprocess
import tempfile
import time

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}

import jax
import jax.numpy as jnp

from trainer.aot import dump
from trainer.aot.chips import Chip
from trainer.aot.cost import analyze
from trainer.aot.roofline import estimate
from trainer.config.load import load
from trainer.data.batches import train_batch
from trainer.data.synthetic import SyntheticRows
from trainer.training.batches import placed
from trainer.training.build import build

ROUNDS = 3
WIDE = {
    "base_emb_dim": 512,
    "base_num_query_heads": 8,
    "base_num_kv_heads": 8,
    "head_dim": 64,
    "base_mlp_dim": 1536,
    "base_num_decoder_layers": 4,
    "vocab_size": 8192,
    "max_target_length": 256,
    "per_device_batch_size": 4,
}
CASES: dict[str, tuple[int, dict[str, object]]] = {
    "base.yml": (1, {}),
    "width 512, 4 layers": (1, WIDE),
    "the same, remat_policy=full": (1, WIDE | {"remat_policy": "full"}),
    "the same, fsdp 4": (4, WIDE | {"remat_policy": "full", "per_device_batch_size": 1}),
}


class Machine:
    """The measured peak of this machine: float32 FLOP/s, and bytes per second read and written."""

    def __init__(self) -> None:
        device = jax.devices()[0]
        self.matrix = jax.device_put(jnp.ones((2048, 2048)), device)
        self.array = jax.device_put(jnp.ones(2**26), device)  # 256 MiB, more than the caches hold
        self.product = jax.jit(jnp.matmul)
        self.shift = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: fresh pages would be slower
        self.peaks: list[float] = []
        self.bandwidths: list[float] = []
        self.measure()
        self.peaks.clear()
        self.bandwidths.clear()

    def measure(self) -> None:
        """Adds a measurement of both peaks."""
        started = time.perf_counter()
        jax.block_until_ready(self.product(self.matrix, self.matrix))
        self.peaks.append(2 * 2048**3 / (time.perf_counter() - started))
        started = time.perf_counter()
        self.array = jax.block_until_ready(self.shift(self.array))
        self.bandwidths.append(2 * self.array.nbytes / (time.perf_counter() - started))

    def chip(self, devices: int) -> Chip:
        """Returns the specification of a simulated device if `devices` of them share the machine."""
        share = statistics.median(self.bandwidths) / devices
        peak = {"f32": statistics.median(self.peaks) / devices, "bf16": statistics.median(self.peaks) / devices}
        return Chip("cpu", ("cpu",), 1, 0, share, peak, share, 1, share, share)


def row(machine: Machine, name: str, devices: int, overrides: dict[str, object]) -> tuple[str, str]:
    """Compares the estimate with a measured step. Returns a row of the first table, and a row of the second table,
    which has the parts of the estimate."""
    settings = {"dataset_type": "synthetic", "eval_interval": -1, "enable_checkpointing": False} | overrides
    run = build(load(["base.yml", *(f"{k}={v}" for k, v in settings.items())]).config, jax.devices()[:devices])
    with tempfile.TemporaryDirectory() as folder:
        step = run.step.lower(*run.abstract_args()).compile(compiler_options=dump.options(folder))
        texts = dump.read(folder)
    cost = analyze(step.as_text(), run.mesh, texts.partitioned or None)
    source = SyntheticRows(run.config.max_target_length, run.config.vocab_size, seed=0)
    batch = placed(run, train_batch(source, 0, run.rows, seed=0, shuffle=False))
    state, taken = run.init(), []
    for _ in range(ROUNDS + 1):
        machine.measure()
        started = time.perf_counter()
        state, metrics = step(state, batch, ())
        jax.block_until_ready(metrics)
        taken.append(time.perf_counter() - started)
    real = statistics.median(taken[1:])
    guess = estimate(cost, machine.chip(devices), devices)
    parts = (guess.compute_seconds, guess.memory_seconds, guess.network_seconds, guess.seconds, guess.serial_seconds)
    compute, memory, network, total, serial, measured = (f"{1e3 * value:.3g}" for value in (*parts, real))
    flops = f"{devices * cost.flops / 1e9:.3g} | {devices * cost.bytes_accessed / 1e9:.3g}"
    return (
        f"| {name} | {total} | {measured} | {guess.seconds / real:.2f} |",
        f"| {name} | {devices} | {flops} | {compute} | {memory} | {network} | {serial} | {guess.bound} |",
    )


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = Machine()
    rows = [row(machine, name, devices, overrides) for name, (devices, overrides) in CASES.items()]
    load_average = os.getloadavg()[1]
    peak, bandwidth = statistics.median(machine.peaks), statistics.median(machine.bandwidths)
    print(
        f"""# Estimated and measured time of a step

`python scripts/benchmark_estimate.py`, commit {commit}, {time.strftime("%Y-%m-%d")}; {os.cpu_count()} cores
({platform.machine()}), Python {platform.python_version()}, JAX {jax.__version__}. Medians of {ROUNDS};
load {load_average:.1f}.

| model | estimate, ms | step, ms | estimate / step |
|{"---|" * 4}
{chr(10).join(summary for summary, _ in rows)}

The parts of the estimate, in milliseconds; GFLOP and GB are totals of all devices:

| model | devices | GFLOP | GB | compute | memory | network | serial | bound |
|{"---|" * 9}
{chr(10).join(parts for _, parts in rows)}

The estimate is the largest part, a lower bound of the step's time; serial is the sum of the parts. The machine's speed
was measured between the steps: {peak / 1e9:.0f} GFLOP/s of float32 matrix products and {bandwidth / 1e9:.1f} GB/s of
memory. Simulated devices share both."""
    )


if __name__ == "__main__":
    main()
