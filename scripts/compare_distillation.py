"""Trains the default model on the same tokens with and without a teacher four times as large, with three seeds.

    python scripts/compare_distillation.py FOLDER                 train the missing runs, print the tables
    python scripts/compare_distillation.py FOLDER --plot X.svg    the same, and draw the curves (needs matplotlib)

A seed determines the initial parameters and the order of the rows. The loss is the cross entropy on all held-out text.
The CPU time of a step with the teacher is compared with that of a plain step plus a forward pass of the teacher; the
programs are timed alternately.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

STEPS, TEACHER_STEPS, EVALUATIONS = 400, 1000, 5
SEEDS = (0, 1, 2)
TEACHER = {"base_emb_dim": 384, "base_num_query_heads": 12, "base_num_kv_heads": 4, "base_mlp_dim": 1024}
TEACHER |= {"learning_rate": 3e-3, "steps": TEACHER_STEPS, "eval_interval": TEACHER_STEPS}
ALPHAS = (None, 0.5, 0.9)  # distill_alpha, the weight of the divergence in the loss; None: without a teacher
COLORS = {None: "#000000", 0.5: "#0072B2", 0.9: "#D55E00"}  # Okabe and Ito's palette, which suits colour-blind readers
STYLES = {None: "-", 0.5: "--", 0.9: "-."}


class Curve(NamedTuple):
    """The evaluations of a run: (updates, nats per token)."""

    points: list[tuple[int, float]]


def trained(folder: Path, command: str, name: str, **keys: object) -> Curve:
    """Returns the curve of a run, which is trained first if its last evaluation is missing."""
    metrics, steps = folder / name / "metrics.jsonl", keys["steps"]
    if not metrics.exists() or (curve := _read(metrics)).points[-1][0] != steps:
        keys |= {"run_name": name, "base_output_directory": folder, "prompt": ""}
        words = [f"{key}={value}" for key, value in keys.items()]
        subprocess.run([sys.executable, "-m", f"trainer.{command}", "base.yml", *words], check=True)
        curve = _read(metrics)
        print(f"==== {name}: loss {curve.points[-1][1]:.4f}", flush=True)
    return curve


def _read(metrics: Path) -> Curve:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Curve([(row["step"] + 1, row["eval_loss"]) for row in rows if "eval_loss" in row] or [(0, 0.0)])


def student(folder: Path, alpha: float | None, seed: int) -> Curve:
    """Returns the curve of a student, which is trained first if necessary."""
    keys = {"steps": STEPS, "eval_interval": STEPS // EVALUATIONS, "enable_checkpointing": False}
    keys |= {"init_weights_seed": seed, "data_shuffle_seed": seed}
    if alpha is None:
        return trained(folder, "train", f"alone-seed{seed}", **keys)
    keys |= {"teacher_path": folder / "teacher", "distill_alpha": alpha}
    return trained(folder, "distill", f"alpha{alpha}-seed{seed}", **keys)


def label(alpha: float | None) -> str:
    return "without a teacher" if alpha is None else f"distill_alpha={alpha}"


def tables(teacher: Curve, curves: dict[float | None, list[Curve]]) -> None:
    """Prints the final losses, and the losses over time, as Markdown."""
    print(f"\nteacher: {teacher.points[-1][1]:.3f} nats after {TEACHER_STEPS} steps\n")
    print("| | held-out loss | difference, seed by seed |\n|---|---|---|")
    for alpha, of in curves.items():
        final = [curve.points[-1][1] for curve in of]
        other = [one - curve.points[-1][1] for one, curve in zip(final, curves[None], strict=True)]
        change = "" if alpha is None else ", ".join(f"{value:+.3f}" for value in other)
        mean, spread = statistics.mean(final), statistics.stdev(final)
        print(f"| {label(alpha)} | {mean:.3f} ± {spread:.3f} | {change} |")
    steps = [step for step, _ in curves[None][0].points]
    print(f"\n| mean loss after | {' | '.join(map(str, steps))} |\n{'|---' * (1 + len(steps))}|")
    for alpha, of in curves.items():
        means = (statistics.mean(dict(curve.points)[step] for curve in of) for step in steps)
        print(f"| {label(alpha)} | {' | '.join(f'{mean:.3f}' for mean in means)} |")


def cpu_seconds() -> None:
    """Prints the CPU seconds of a step with the teacher, of a plain step, and of the teacher's forward pass."""
    import jax
    from benchmark_default import batch_of, built

    plain, taught = built(), built(use_distill=True, teacher_overrides=dict(list(TEACHER.items())[:4]))
    batch, weights = (
        batch_of(plain),
        jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), taught.frozen.abstract),
    )

    def logits(frozen: Any, batch: Any) -> Any:
        hidden = taught.objective.teacher_hidden(frozen, batch)
        return taught.objective.teacher.apply(frozen["params"], frozen["rest"], hidden, method="head")[0]

    forward = jax.jit(taught.sharded(logits))
    states = {"plain": plain.init(), "taught": taught.init()}
    seconds: dict[str, list[float]] = {"plain": [], "taught": [], "forward": []}

    def timed(name: str, run: Any) -> None:
        started = time.process_time()
        for _ in range(4):
            jax.block_until_ready(run())
        seconds[name].append((time.process_time() - started) / 4)

    def step(name: str, run: Any, frozen: Any) -> Any:
        states[name], metrics = run.step(states[name], batch, frozen)
        return metrics

    for _ in range(8):
        timed("plain", lambda: step("plain", plain, ()))
        timed("taught", lambda: step("taught", taught, weights))
        timed("forward", lambda: forward(weights, batch))
    medians = {name: statistics.median(of[1:]) for name, of in seconds.items()}  # the first rounds compile
    ratio = medians["taught"] / (medians["plain"] + medians["forward"])
    print(f"\nCPU seconds: {medians}; a taught step / (a plain step + a forward pass): {ratio:.2f}")


def plot(curves: dict[float | None, list[Curve]], file: str) -> None:
    """Draws the mean loss of the seeds, and a band from the lowest to the highest loss."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for alpha, of in curves.items():
        steps = [step for step, _ in of[0].points]
        losses = [[dict(curve.points)[step] for curve in of] for step in steps]
        axes.plot(
            steps, [*map(statistics.mean, losses)], color=COLORS[alpha], linestyle=STYLES[alpha], label=label(alpha)
        )
        axes.fill_between(steps, [*map(min, losses)], [*map(max, losses)], color=COLORS[alpha], alpha=0.15, linewidth=0)
    axes.set_xlabel("updates")
    axes.set_ylabel("held-out loss, nats per token")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    teacher = trained(args.folder, "train", "teacher", **TEACHER)
    curves: dict[float | None, list[Curve]] = {alpha: [] for alpha in ALPHAS}
    for seed in SEEDS:  # seed by seed, so that an interrupted comparison has complete seeds
        for alpha in ALPHAS:
            curves[alpha].append(student(args.folder, alpha, seed))
    tables(teacher, curves)
    cpu_seconds()
    if args.plot:
        plot(curves, args.plot)


if __name__ == "__main__":
    main()
