"""Trains a model with data parallelism, DiLoCo and streaming DiLoCo; compares losses and bytes sent between islands.

    python scripts/compare_diloco.py FOLDER                 train, compile, print the tables
    python scripts/compare_diloco.py FOLDER --plot X.svg    the same, and draw the curves (needs matplotlib)

All runs use eight simulated devices and the same rows in each step. DiLoCo has four islands with fsdp 2; data
parallelism has data 4 x fsdp 2. First, DiLoCo runs with each outer learning rate in RATES and the first of SEEDS; then,
all methods run with each of SEEDS, where DiLoCo and streaming DiLoCo use the best rate. A seed determines the initial
parameters and the order of the rows. Each run has its own folder, and a complete run is not repeated. Bytes are counted
in the compiled step.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("NPROC", "32")  # as trainer.train sets it for eight simulated devices

import jax
import numpy as np
from benchmark_default import built

from trainer import train
from trainer.aot.cost import analyze
from trainer.state.fragments import fragments

STEPS, EVAL_INTERVAL, PERIOD = 160, 20, 20
RATES, SEEDS = (0.3, 0.7), (0, 1, 2)
MODEL = {"base_num_decoder_layers": 4, "ici_fsdp_parallelism": 2, "per_device_batch_size": 1, "steps": STEPS}
DILOCO = {"enable_diloco": True, "ici_diloco_parallelism": 4, "diloco_sync_period": PERIOD}
STREAMING = DILOCO | {"enable_streaming_diloco": True, "num_diloco_fragments": 3}
STREAMING |= {"num_communication_overlapping_steps": 1, "communication_overlapping_alpha": 0.5}
KINDS = {
    "data parallelism": {"ici_data_parallelism": 4},
    "DiLoCo": DILOCO,
    "streaming DiLoCo": STREAMING,
    "streaming DiLoCo, int8": STREAMING | {"diloco_outer_grad_dtype": "int8"},
}
LOOKS = {  # Okabe and Ito's palette, which suits colour-blind readers
    "data parallelism": ("#000000", "-"),
    "DiLoCo": ("#0072B2", "--"),
    "streaming DiLoCo": ("#D55E00", "-."),
    "streaming DiLoCo, int8": ("#009E73", ":"),
}


def curve(folder: Path, kind: str, seed: int, rate: float | None) -> list[tuple[int, float]]:
    """Returns the (updates, evaluation loss) of a run, which is trained first unless its metrics are complete."""
    run = f"{kind.replace(', ', '-').replace(' ', '-')}-seed{seed}" + (f"-{rate:g}" if rate else "")
    metrics = folder / run / "metrics.jsonl"
    if not metrics.exists() or not (points := _points(metrics)) or points[-1][0] != STEPS:
        keys = MODEL | KINDS[kind] | {"init_weights_seed": seed, "data_shuffle_seed": seed}
        keys |= {"diloco_outer_lr": rate} if rate else {}
        keys |= {"eval_interval": EVAL_INTERVAL, "eval_steps": 16, "enable_checkpointing": False, "prompt": ""}
        keys |= {"base_output_directory": folder, "run_name": run}
        started = time.perf_counter()
        train.main(["base.yml", *(f"{key}={value}" for key, value in keys.items())])
        points = _points(metrics)
        print(f"==== {run}: loss {points[-1][1]:.4f}, {time.perf_counter() - started:.0f} s", flush=True)
    return points


def _points(metrics: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(row["step"] + 1, row["eval_loss"]) for row in rows if "eval_loss" in row]


def sent(kind: str) -> tuple[float, float]:
    """Returns the (peak, mean) bytes per step that one device sends to other islands; without DiLoCo, along the axis
    data."""
    run = built(**MODEL | KINDS[kind])
    found = analyze(run.compile().as_text(), run.mesh).collectives
    if not run.config.enable_diloco:
        total = sum(it.bytes for it in found if "data" in it.axes)
        return total, total
    # Each conditional of the step synchronizes one fragment, and sends little besides the fragment's parameters. So the
    # bytes that a conditional sends are proportional to the size of its fragment.
    total = sum(it.bytes for it in found if "diloco" in it.axes)
    params = run.codec.unpack(run.abstract_args()[0]).params
    sizes = [_numbers(jax.eval_shape(part.part, params)) for part in fragments(run.config)]
    return total * max(sizes) / sum(sizes), total / PERIOD


def _numbers(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def tables(rates: dict[float, float], curves: dict[str, list]) -> None:
    """Prints the comparison, then the rates, as Markdown."""
    print(
        "\n| | final loss | above data parallelism's | peak bytes sent in a step | mean bytes |\n|---|---|---|---|---|"
    )
    plain = [points[-1][1] for points in curves["data parallelism"]]
    for kind, of in curves.items():
        final = [points[-1][1] for points in of]
        above = [loss - other for loss, other in zip(final, plain, strict=True)]
        margin = f"{statistics.mean(above):.3f} (at most {max(above):.3f})" if kind != "data parallelism" else ""
        peak, mean = sent(kind)
        spread = f"{statistics.mean(final):.3f} ± {statistics.stdev(final):.3f}"
        print(f"| {kind} | {spread} | {margin} | {peak / 1e6:.3f} MB | {mean / 1e6:.4f} MB |")
    print(f"\nDiLoCo, seed {SEEDS[0]}, final loss by diloco_outer_lr: {rates}")


def plot(curves: dict[str, list], file: str) -> None:
    """Draws the evaluation loss against tokens: mean of the seeds, and a band from lowest to highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for kind, of in curves.items():
        color, style = LOOKS[kind]
        losses = np.array([[loss for _, loss in points] for points in of])
        tokens = [step * 1024 / 1000 for step, _ in of[0]]
        panel.plot(tokens, losses.mean(0), style, color=color, label=kind)
        panel.fill_between(tokens, losses.min(0), losses.max(0), color=color, alpha=0.2, linewidth=0)
    panel.set(xlabel="thousand tokens", ylabel="loss on held-out text (nats per token)")
    panel.set_title(f"Four islands that synchronize every {PERIOD} steps; mean and range of {len(SEEDS)} seeds")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Trains the missing runs, then reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plot", metavar="FILE")
    given = parser.parse_args()
    rates = {rate: curve(given.folder, "DiLoCo", SEEDS[0], rate)[-1][1] for rate in RATES}
    best = min(rates, key=rates.__getitem__)
    curves: dict[str, list] = {kind: [] for kind in KINDS}
    for seed in SEEDS:  # seed by seed, so that an interrupted comparison has equally many runs of each kind
        for kind, keys in KINDS.items():
            rate = best if "enable_diloco" in keys else None
            curves[kind].append(curve(given.folder, kind, seed, rate))
    tables(rates, curves)
    if given.plot:
        plot(curves, given.plot)


if __name__ == "__main__":
    main()
