"""Trains with all combinations of mesh, NNX flags, layer loop and accumulation; compares results with one device's.

    python scripts/matrix.py --part 1/4 --out matrix.jsonl     # and 2/4, ...; skips cases that the file contains
    python scripts/matrix.py --table matrix.jsonl              # the table of docs/benchmarks/sharding.md

The script runs the full product of these options, in parts, on eight simulated devices with a tiny model and two SGD
steps. The test suite runs a pairwise covering set of more options.
"""

import argparse
import itertools
import json
import math
import os
import time
from pathlib import Path

MESHES = {
    "1 device": {},
    "data 8": {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1},
    "fsdp 8": {"ici_fsdp_parallelism": 8},
    "data 2 x fsdp 4": {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4},
    "fsdp 4 x tensor 2": {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
    "data 2 x tensor 4, Zero-1": {
        "ici_data_parallelism": 2,
        "ici_fsdp_parallelism": 1,
        "ici_tensor_parallelism": 4,
        "shard_optimizer_over_data": True,
    },
    "data 4 x fsdp 2, Zero-1": {
        "ici_data_parallelism": 4,
        "ici_fsdp_parallelism": 2,
        "shard_optimizer_over_data": True,
    },
    "fsdp 4 x tensor_sequence 2": {"ici_fsdp_parallelism": 4, "ici_tensor_sequence_parallelism": 2},
    "fsdp 2 x fsdp_transpose 2 x tensor 2": {
        "ici_fsdp_parallelism": 2,
        "ici_fsdp_transpose_parallelism": 2,
        "ici_tensor_parallelism": 2,
    },
    "2 slices: data 2 x fsdp 2 x tensor_sequence 2": {
        "dcn_data_parallelism": 2,
        "ici_fsdp_parallelism": 2,
        "ici_tensor_sequence_parallelism": 2,
    },
}
SIZES = {
    "dataset_type": "synthetic",
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 32,
    "base_num_decoder_layers": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_target_length": 16,
    "eval_interval": -1,
    "opt_type": "sgd",
    "learning_rate": 0.1,
    "lr_schedule_type": "constant",
    "warmup_steps_fraction": 0,
}
ROWS, STEPS = 16, 2
# Losses are float32 sums, and a mesh changes the order of addition.
TOLERANCE = 1e-5


def losses(combination: str, mesh: str, scan_layers: bool, microbatches: int) -> list[float]:
    """Returns one list with the loss and the gradient norm of each step in turn."""
    import jax

    from trainer.config.flags import flags_of
    from trainer.config.load import load
    from trainer.data.batches import train_batch
    from trainer.data.synthetic import SyntheticRows
    from trainer.ops.random import seed_key
    from trainer.training.batches import placed
    from trainer.training.build import build

    devices = jax.devices() if MESHES[mesh] else jax.devices()[:1]
    words = SIZES | flags_of(combination) | MESHES[mesh] | {"scan_layers": scan_layers}
    words |= {"gradient_accumulation_steps": microbatches, "per_device_batch_size": ROWS / len(devices) / microbatches}
    run = build(load([f"{key}={value}" for key, value in words.items()]).config, devices)
    # Optimization level 0 compiles a step several times as fast. It may change rounding, but results are compared with
    # a tolerance.
    quick = {"xla_backend_optimization_level": 0}
    step = run.step.lower(*run.abstract_args()).compile(quick)
    source = SyntheticRows(run.config.max_target_length, run.config.vocab_size, seed=0)
    # Not jitted, so that all cases initialize with the same operations.
    state, found = jax.device_put(run.codec.init(seed_key(0)), run.states.shardings), []
    for i in range(STEPS):
        batch = train_batch(source, i * ROWS, ROWS, seed=0, shuffle=False)
        state, metrics = step(state, placed(run, batch), ())
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return found


def cases() -> list[tuple[str, str, bool, int]]:
    """Returns the full product of the options. All other cases are compared with the first one."""
    from trainer.backends.registry import MODELS

    return list(itertools.product(MODELS, MESHES, (True, False), (1, 2)))


def run_part(part: int, parts: int, out: Path) -> None:
    """Runs every `parts`-th case, starting with number `part`, and appends the results to `out`."""
    done = {tuple(row["case"]) for row in read(out)}
    for case in cases()[part - 1 :: parts]:
        if case in done:
            continue
        began = time.perf_counter()
        row = {"case": case, "losses": losses(*case), "seconds": round(time.perf_counter() - began, 1)}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def read(path: Path) -> list[dict]:
    """Returns the rows of a file of results; [] if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: list[dict]) -> str:
    """Returns a Markdown table: a row per mesh, and a column per combination of the NNX flags. Each cell has the
    largest relative difference from the results of one device.

    Raises:
      SystemExit: a case is missing, or differs by more than rounding.
    """
    found = {tuple(row["case"]): row["losses"] for row in rows}
    missing = [case for case in cases() if case not in found]
    if missing:
        raise SystemExit(f"{len(missing)} of {len(cases())} cases have not been run, such as {missing[0]}")
    combinations = list(dict.fromkeys(case[0] for case in cases()))
    lines = ["| mesh | " + " | ".join(combinations) + " |", "|---" * (len(combinations) + 1) + "|"]
    worst = 0.0
    for mesh in MESHES:
        cells = []
        for combination in combinations:
            errors = [
                abs(a / b - 1) if math.isfinite(a) else math.inf
                for case, values in found.items()
                if case[:2] == (combination, mesh)
                for a, b in zip(values, found[cases()[0]], strict=True)
            ]
            worst = max(worst, *errors)
            cells.append(f"{max(errors):.0e}")
        lines.append(f"| {mesh} | " + " | ".join(cells) + " |")
    if worst > TOLERANCE:
        raise SystemExit("\n".join([*lines, f"a case differs by {worst:.1e}, more than {TOLERANCE:.0e}"]))
    return "\n".join(lines)


def main() -> None:
    """Runs a part, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="i/n: every n-th case, beginning with the i-th")
    parser.add_argument("--out", type=Path, default=Path("matrix.jsonl"))
    parser.add_argument("--table", type=Path, help="print the table of these results")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(read(arguments.table)))
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    part, _, parts = arguments.part.partition("/")
    run_part(int(part), int(parts), arguments.out)


if __name__ == "__main__":
    main()
