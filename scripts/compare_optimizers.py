"""Trains the default model with AdamW, Muon and Lion; compares the steps and the time to reach an evaluation loss.

    python scripts/compare_optimizers.py FOLDER                 train, measure the time of a step, print the tables
    python scripts/compare_optimizers.py FOLDER --plot X.svg    the same, and draw the curves (needs matplotlib)

All optimizers are tuned in the same way. First, RATES learning rates, a factor of 2 apart, are tried in runs of
TUNING_STEPS steps with seed 0; while the best rate is the lowest or the highest of the rates tried so far, the next
rate beyond it is tried, too. Then come runs of STEPS steps with the best rate and each of SEEDS. A seed determines both
the initial parameters and the order of the rows. The learning rate schedule is as long as the run. Each run has its own
folder, and a complete run is not repeated. The time of a step is a ratio of CPU seconds of programs that are timed
alternately, so that other work on the machine hardly affects it.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from benchmark_default import batch_of, built

from trainer import train

STEPS, TUNING_STEPS = 260, 100
EVAL_INTERVAL = 52  # steps; evaluations use all held-out rows
REFERENCES = (156, 208, 260)  # numbers of steps; the table shows when others reach AdamW's loss after each
RATES, SEEDS = 4, (0, 1, 2)
ROUNDS, TIMED_STEPS = 12, 4
# Maps an optimizer to the lowest of its first learning rates, and to the settings that make the rates of optimizers
# comparable: Lion uses a tenth of AdamW's rates and ten times its weight decay (as its paper advises); Muon uses
# AdamW's weight decay and update size.
OPTIMIZERS = {
    "adamw": (3e-3, {}),
    "muon": (3e-3, {"muon_consistent_rms": 0.2, "muon_weight_decay": 0.1}),
    "lion": (3e-4, {"lion_weight_decay": 1.0}),
}
COLORS = {"adamw": "#0072B2", "muon": "#D55E00", "lion": "#009E73"}  # Okabe and Ito's palette for colour-blind readers
STYLES = {"adamw": "-", "muon": "--", "lion": "-."}


def curve(folder: Path, name: str, rate: float, seed: int, steps: int) -> list[tuple[int, float]]:
    """Returns the (updates, evaluation loss) of a run, which is trained first unless its metrics are complete."""
    run = f"{name}-{rate:g}-seed{seed}-{steps}"
    metrics = folder / run / "metrics.jsonl"
    if not metrics.exists() or not (points := _points(metrics)) or points[-1][0] != steps:
        keys = OPTIMIZERS[name][1] | {"opt_type": name, "learning_rate": rate, "steps": steps}
        keys |= {"init_weights_seed": seed, "data_shuffle_seed": seed}
        # For tuning, a few batches of held-out rows are enough.
        keys |= {"eval_interval": EVAL_INTERVAL} if steps == STEPS else {"eval_interval": steps, "eval_steps": 8}
        keys |= {"enable_checkpointing": False, "prompt": ""}
        keys |= {"base_output_directory": folder, "run_name": run}
        started = time.perf_counter()
        train.main(["base.yml", *(f"{key}={value}" for key, value in keys.items())])
        points = _points(metrics)
        print(f"==== {run}: loss {points[-1][1]:.4f}, {time.perf_counter() - started:.0f} s", flush=True)
    return points


def _points(metrics: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(row["step"] + 1, row["eval_loss"]) for row in rows if "eval_loss" in row]


def tune(folder: Path, name: str) -> dict[float, float]:
    """Returns a dict from learning rate to last evaluation loss. The best rate is neither the lowest nor the
    highest."""
    lowest = OPTIMIZERS[name][0]
    losses: dict[float, float] = {}
    wanted = [lowest * 2**i for i in range(RATES)]
    while wanted:
        for rate in wanted:
            losses[rate] = curve(folder, name, rate, 0, TUNING_STEPS)[-1][1]
        best = min(losses, key=losses.__getitem__)
        wanted = [rate for rate in (best / 2, best * 2) if rate not in losses]
    return dict(sorted(losses.items()))


def steps_to(points: list[tuple[int, float]], loss: float) -> float:
    """Returns the number of updates until the evaluation loss is first at most `loss`, interpolated linearly between
    two evaluations; NaN if it never is."""
    for (a, before), (b, after) in itertools.pairwise(points):
        if after <= loss:
            return a + (b - a) * min(1.0, max(0.0, (before - loss) / (before - after)))
    return float("nan")


def step_ratios(rates: dict[str, float]) -> dict[str, list[float]]:
    """Returns a dict from optimizer to the CPU seconds of a whole training step in each round, relative to AdamW's."""
    runs = {name: built(opt_type=name, learning_rate=rates[name], **keys) for name, (_, keys) in OPTIMIZERS.items()}
    steps = {name: run.compile() for name, run in runs.items()}
    states = {name: run.init() for name, run in runs.items()}
    batch = batch_of(runs["adamw"])
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(ROUNDS + 1):
        for name, step in steps.items():
            started = time.process_time()
            for _ in range(TIMED_STEPS):
                states[name], metrics = step(states[name], batch, ())
                jax.block_until_ready(metrics)
            if i:  # the first round warms up
                seconds[name].append(time.process_time() - started)
    return {name: [b / a for a, b in zip(seconds["adamw"], taken, strict=True)] for name, taken in seconds.items()}


def tables(tuned, curves, ratios) -> None:
    """Prints the comparison, then the tuning, as Markdown.

    The steps and time to a loss are compared seed by seed, with the same initial parameters and rows.
    """
    heads = [f"steps to AdamW's after {steps} | time" for steps in REFERENCES]
    print(f"\n| `opt_type` | learning rate | final loss | CPU time of a step | {' | '.join(heads)} |")
    print("|---" * (4 + 2 * len(REFERENCES)) + "|")
    for name, of in curves.items():
        final = [points[-1][1] for points in of]
        ratio = statistics.median(ratios[name])
        rate = min(tuned[name], key=tuned[name].__getitem__)
        cells = [f"{rate:g}", f"{statistics.mean(final):.3f} ± {statistics.stdev(final):.3f}", f"{ratio:.2f}"]
        for reference in REFERENCES:
            pairs = zip(of, curves["adamw"], strict=True)
            steps = statistics.mean(steps_to(points, dict(adamw)[reference]) for points, adamw in pairs)
            cells += ["not reached", ""] if math.isnan(steps) else [f"{steps:.0f}", f"{steps * ratio / reference:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| seed | " + " | ".join(f"final loss, {name}" for name in curves) + " |")
    print("|---" * (1 + len(curves)) + "|")
    for i, seed in enumerate(SEEDS):
        print(f"| {seed} | " + " | ".join(f"{of[i][-1][1]:.3f}" for of in curves.values()) + " |")
    print(f"\n| `opt_type` | learning rate: loss after {TUNING_STEPS} steps, seed 0 |\n|---|---|")
    for name, losses in tuned.items():
        print(f"| {name} | {', '.join(f'{rate:g}: {loss:.3f}' for rate, loss in losses.items())} |")
    for name, of in ratios.items():
        low, middle, high = np.percentile(of, (25, 50, 75))
        print(f"\n{name}: CPU seconds of a step / adamw's {middle:.3f}, quartiles {low:.3f} and {high:.3f}")


def plot(curves, ratios, file: str) -> None:
    """Draws the evaluation loss against steps and against time: the mean of the seeds, and a band from the lowest to
    the highest loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for name, of in curves.items():
        steps = np.array([step for step, _ in of[0]])
        losses = np.array([[loss for _, loss in points] for points in of])
        for panel, x in zip(panels, (steps, steps * statistics.median(ratios[name])), strict=True):
            panel.plot(x, losses.mean(0), STYLES[name], color=COLORS[name], label=name)
            panel.fill_between(x, losses.min(0), losses.max(0), color=COLORS[name], alpha=0.25, linewidth=0)
    panels[0].set_ylabel("loss on held-out text (nats per token)")
    panels[0].set_xlabel("training steps (1024 tokens each)")
    panels[1].set_xlabel("CPU time (steps of AdamW)")
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"Default model, mean of {len(SEEDS)} seeds; band: lowest to highest seed")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Trains the missing runs, then reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plot", metavar="FILE")
    given = parser.parse_args()
    tuned = {name: tune(given.folder, name) for name in OPTIMIZERS}
    rates = {name: min(losses, key=losses.__getitem__) for name, losses in tuned.items()}
    curves: dict[str, list] = {name: [] for name in OPTIMIZERS}
    for seed in SEEDS:  # seed by seed, so that an interrupted comparison has equally many runs of each kind
        for name in OPTIMIZERS:
            curves[name].append(curve(given.folder, name, rates[name], seed, STEPS))
    measured = given.folder / "step_ratios.json"
    if not measured.exists():
        measured.write_text(json.dumps(step_ratios(rates)))
    ratios = json.loads(measured.read_text())
    tables(tuned, curves, ratios)
    if given.plot:
        plot(curves, ratios, given.plot)


if __name__ == "__main__":
    main()
