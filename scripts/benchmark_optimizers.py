"""Measures the optimizers on this machine and prints three Markdown tables.

    python scripts/benchmark_optimizers.py

The tables:
- bytes of optimizer state per parameter on 8 simulated devices, with and without Zero-1
- CPU time (also relative to AdamW's) and FLOPs of an update of the default model; one process times the optimizers
  alternately
- collectives of Muon's update with Zero-1 and with fsdp
"""

import math
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import optax

from trainer.aot.cost import analyze
from trainer.config.load import load
from trainer.config.schema import schema
from trainer.optim.muon import NS_STEPS
from trainer.state.muon import get_muon_weight_dimension_numbers
from trainer.training.build import build

ROUNDS, UPDATES = 6, 5
LAYERS = 8  # a multiple of the 8 devices on the axis data
DATA = {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1}
TIMED = {
    "adamw": {},
    "muon": {"opt_type": "muon"},
    "muon in bfloat16": {"opt_type": "muon", "muon_newton_schulz_dtype": "bfloat16"},
    "adafactor": {"opt_type": "adafactor"},
    "lion": {"opt_type": "lion"},
}


def built(devices: int, **keys):
    """Returns a run with base.yml's widths on `devices` simulated devices."""
    settings = {"dataset_type": "synthetic", "eval_interval": -1} | keys
    return build(load(["base.yml", *(f"{k}={v}" for k, v in settings.items())]).config, jax.devices()[:devices])


def update(run):
    """Returns the compiled update of a run's optimizer, a function (gradients, optimizer state, parameters) ->
    (parameters, optimizer state) on canonical trees."""
    tree = run.codec.unpack(run.abstract_args()[0])

    def apply(grads, opt_state, params):
        updates, opt_state = run.codec.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    stored = jax.tree.map(lambda leaf: leaf.sharding, (tree.params, tree.opt_state))
    return jax.jit(apply, out_shardings=stored).lower(tree.params, tree.opt_state, tree.params).compile()


def bytes_per_parameter() -> None:
    """Prints the first table."""
    print("| `opt_type` | on a device, data 8 | the same with Zero-1 |\n|---|---|---|")
    for name in schema().keys["opt_type"].choices:
        cells = []
        for keys in ({}, {"shard_optimizer_over_data": True}):
            totals = built(8, opt_type=name, base_num_decoder_layers=LAYERS, **DATA, **keys).table()["totals"]
            cells.append(totals["optimizer_bytes_per_device"] / totals["parameters"])
        print(f"| {name} | {cells[0]:.2f} | {cells[1]:.2f} |", flush=True)


def cpu_seconds(programs, states) -> dict[str, list[float]]:
    """Returns the CPU seconds per update in each round, by program."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for i in range(ROUNDS + 1):
        for name, program in programs.items():
            params, opt_state = states[name]
            started = time.process_time()
            for _ in range(UPDATES):
                params, opt_state = jax.block_until_ready(program(params, opt_state, params))
            states[name] = params, opt_state
            if i:  # the first round warms up
                seconds[name].append((time.process_time() - started) / UPDATES)
    return seconds


def newton_schulz_flops(run) -> int:
    """Returns the FLOPs of the matrix products in Muon's iterations: NS_STEPS (4 m^2 n + 2 m^3) for every matrix with
    the shorter side m and the longer side n."""
    params = run.codec.unpack(run.abstract_state).params
    dims = get_muon_weight_dimension_numbers(run.config)
    leaves = jax.tree.leaves(params)
    of = jax.tree.leaves(
        dims, is_leaf=lambda node: node is None or isinstance(node, optax.contrib.MuonDimensionNumbers)
    )
    total = 0
    for leaf, axes in zip(leaves, of, strict=True):
        if axes is not None:
            m, n = sorted(math.prod(leaf.shape[i] for i in side) for side in axes)
            total += leaf.size // (m * n) * NS_STEPS * (4 * m**2 * n + 2 * m**3)
    return total


def times_and_flops() -> None:
    """Prints the second table."""
    runs = {name: built(1, **keys) for name, keys in TIMED.items()}
    programs = {name: update(run) for name, run in runs.items()}
    trees = {name: run.codec.unpack(run.init()) for name, run in runs.items()}
    seconds = cpu_seconds(programs, {name: (tree.params, tree.opt_state) for name, tree in trees.items()})
    print("\n| update | CPU ms | ratio to adamw | FLOPs of products | by the formula |\n|---|---|---|---|---|")
    for name, run in runs.items():
        ratio = statistics.median(b / a for a, b in zip(seconds["adamw"], seconds[name], strict=True))
        flops = sum(analyze(programs[name].as_text()).matmul_flops.values())
        formula = f"{newton_schulz_flops(run):.4g}" if run.config.opt_type == "muon" else ""
        print(f"| {name} | {1000 * statistics.median(seconds[name]):.1f} | {ratio:.2f} | {flops:.4g} | {formula} |")


def collectives() -> None:
    """Prints the third table."""
    print(
        "\n| Muon's update, 8 devices | all-gather | all-reduce | of a scalar | other | MB sent by a device |"
        "\n|---|---|---|---|---|---|"
    )
    cases = {
        f"Zero-1, data 8, {LAYERS} layers": DATA | {"shard_optimizer_over_data": True},
        "Zero-1, data 8, 2 layers": DATA | {"shard_optimizer_over_data": True, "base_num_decoder_layers": 2},
        f"fsdp 8, {LAYERS} layers": {"ici_fsdp_parallelism": 8},
    }
    for name, keys in cases.items():
        run = built(8, opt_type="muon", **{"base_num_decoder_layers": LAYERS} | keys)
        found = analyze(update(run).as_text(), run.mesh).collectives
        gathers, reduces = ([c for c in found if c.kind == kind] for kind in ("all-gather", "all-reduce"))
        scalars = [c for c in reduces if c.size == 4]
        cells = [sum(c.count for c in part) for part in (gathers, reduces, scalars, found)]
        cells[-1] -= cells[0] + cells[1]
        print(f"| {name} | {' | '.join(map(str, cells))} | {sum(c.bytes for c in found) / 1e6:.2f} |", flush=True)


if __name__ == "__main__":
    bytes_per_parameter()
    times_and_flops()
    collectives()
