"""Measures the five combinations of enable_nnx, pure_nnx_decoder and pure_nnx, and prints a Markdown report.

    python scripts/benchmark_migration.py > docs/benchmarks/migration.md

Steps of all combinations are timed alternately, so that other load on the machine affects all of them alike.
"""

import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from flax import nnx

from trainer.config.flags import COMBINATIONS, FLAGS, flags_of
from trainer.config.load import load
from trainer.data.batches import train_batch
from trainer.data.synthetic import SyntheticRows
from trainer.training.batches import placed
from trainer.training.build import build

ROUNDS, STEPS = 10, 10
SUBLAYERS = 84  # x 2 (kernel, bias) x 3 (parameter, two moments) = 504 leaves, plus embedding, norm, head and counts
HOST = {
    "decoder_block": "scripts.benchmark_migration:Distinct",
    "remat_policy": "none",
    "base_num_decoder_layers": 1,
    "base_emb_dim": 2,
    "vocab_size": 2,
    "max_target_length": 2,
    "per_device_batch_size": 1,
}


class Distinct(nnx.Module):
    """A block of many distinct sublayers, which are not stacked, so that the train state has many leaves."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.parts = nnx.List(
            [nnx.Linear(config.base_emb_dim, config.base_emb_dim, rngs=rngs) for _ in range(SUBLAYERS)]
        )

    def __call__(self, x, cache, context):
        """Adds part(x) to x for each sublayer."""
        for part in self.parts:
            x = x + part(x)
        return x, cache


class Measured:
    """One combination's compiled step, and its measurements."""

    def __init__(self, name: str, **overrides):
        keys = {"dataset_type": "synthetic", "eval_interval": -1} | overrides | flags_of(name)
        run = build(load([f"{key}={value}" for key, value in keys.items()]).config, jax.devices())
        self.structure: Any  # a PyTreeDef, whose stubs lack unflatten
        self.leaves, self.structure = jax.tree.flatten(run.init())
        started = time.perf_counter()
        lowered = run.step_on_leaves.lower(self.leaves, *run.abstract_args()[1:])
        self.trace = time.perf_counter() - started
        started = time.perf_counter()
        # Only the case for the host's time (HOST) has overrides. Its program need not be optimized.
        self.compiled = lowered.compile({"xla_backend_optimization_level": 0} if overrides else None)
        self.compile = time.perf_counter() - started
        source = SyntheticRows(run.config.max_target_length, run.config.vocab_size, seed=0)
        batch = train_batch(source, 0, run.rows, seed=0, shuffle=False)
        self.batch = placed(run, batch, run.rows)
        self.seconds: list[float] = []
        self.apart: list[float] = []

    def steps(self) -> None:
        """Times a few steps that are called with the leaves of the state. Also times flattening and unflattening the
        state, which each call would need in addition if it took the native state."""
        for _ in range(STEPS):
            started = time.perf_counter()
            self.leaves, metrics = self.compiled(self.leaves, self.batch, ())
            jax.block_until_ready((self.leaves, metrics))
            self.seconds.append(time.perf_counter() - started)
            state = self.structure.unflatten(self.leaves)
            started = time.perf_counter()
            leaves, _ = jax.tree.flatten(state)
            self.structure.unflatten(leaves)
            self.apart.append(time.perf_counter() - started)


def milliseconds(seconds: list[float]) -> float:
    """Returns the median of `seconds` in milliseconds."""
    return 1e3 * statistics.median(seconds)


def main() -> None:
    """Prints the report."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    print("# The five combinations side by side\n")
    print(f"`python scripts/benchmark_migration.py`, commit {commit.strip()}, {time.strftime('%Y-%m-%d')}; ", end="")
    load_average = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores ({platform.machine()}), load {load_average:.1f}, JAX {jax.__version__}.\n")
    default = {name: Measured(name) for name in COMBINATIONS}
    host = {name: Measured(name, **HOST) for name in COMBINATIONS}
    for _ in range(ROUNDS):
        for measured in (*default.values(), *host.values()):
            measured.steps()
    columns = [
        "combination",
        "step, ms",
        "trace and lower, s",
        "compile, s",
        "arguments, MB",
        "temporaries, MB",
        "GFLOP",
    ]
    print(f"The default model:\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, it in default.items():
        memory, flops = it.compiled.memory_analysis(), it.compiled.cost_analysis()["flops"]
        numbers = (
            f"{memory.argument_size_in_bytes / 1e6:.2f} | {memory.temp_size_in_bytes / 1e6:.2f} | {flops / 1e9:.4f}"
        )
        print(f"| {name} | {milliseconds(it.seconds):.1f} | {it.trace:.2f} | {it.compile:.2f} | {numbers} |")
    leaves = ", ".join(map(str, sorted({len(it.leaves) for it in host.values()})))
    print(
        f'\nA train state of {leaves} leaves with almost no arithmetic. "Step" is called with the leaves, as in the\n'
        'loop. "Unpack and pack" is the time that each call would add if it took the native state. The loop unpacks\n'
        "and packs only once.\n\n| combination | step, ms | unpack and pack, ms |\n|---|---|---|"
    )
    for name, it in host.items():
        print(f"| {name} | {milliseconds(it.seconds):.2f} | {milliseconds(it.apart):.2f} |")
    source = Path(__file__).parents[1] / "src" / "trainer"
    print("\nWhere the three flags are named in src/trainer:\n")
    for path in sorted(source.rglob("*.py")):
        if found := len(re.findall("|".join(rf"\b{flag}\b" for flag in FLAGS), path.read_text(encoding="utf-8"))):
            print(f"- {path.relative_to(source)}: {found}")
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (source / "linen").glob("*.py"))
    print(f"\nLines of src/trainer/linen: {lines}.")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
