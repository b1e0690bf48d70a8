"""Uses GRPO to train a small model to add numbers, with and without batch_invariant, and prints a Markdown table.

    python scripts/benchmark_grpo.py FOLDER                 train the missing runs, print the table
    python scripts/benchmark_grpo.py FOLDER --plot X.svg    the same, and draw the curves (needs matplotlib)
    python scripts/benchmark_grpo.py FOLDER --quick         a few rounds with one seed, to test the script

All runs begin with the same model, the result of supervised fine-tuning on sums. A seed determines the order of the
prompts and the sampling. Accuracy is measured with greedy answers to 2,000 held-out sums. Seconds include the steps and
their rollouts, but neither evaluations nor the first round, which compiles.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import sums

from trainer.config.words import counted

SEEDS = (0, 1, 2)
TASK = {
    "dataset_type": "grain",
    "grain_file_type": "jsonl",
    "grain_train_files": "sums/train.jsonl",
    "grain_eval_files": "sums/held-out.jsonl",
    "train_data_columns": "[prompt,answer]",
    "eval_data_columns": "[prompt,answer]",
    "tokenizer_type": "bytes",
    "max_target_length": 12,
    "prompt": "",
    "base_output_directory": "runs",
    "max_num_checkpoints_to_keep": 1,
}
MODEL = {
    "base_emb_dim": 128,
    "base_num_decoder_layers": 3,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 32,
    "base_mlp_dim": 384,
    "vocab_size": 257,
}
TUNING = {"packing": "false", "per_device_batch_size": 64, "steps": 520, "learning_rate": 1e-3, "eval_interval": 520}
GRPO = {
    "load_parameters_path": "runs/tuned",
    "reward_functions": "[sums:exact]",
    "batch_size": 64,
    "rl_num_generations": 16,
    "rl_grpo_beta": 0,
    "per_device_batch_size": 256,
    "gradient_accumulation_steps": 4,
    "learning_rate": 3e-4,
    "warmup_steps_fraction": 0.03,
    "learning_rate_schedule_steps": 1000,
    "adam_b2": 0.99,
    "adam_weight_decay": 0,
    "num_batches": 1000,
    "eval_interval": 25,
    "eval_per_device_batch_size": 500,
    "eval_steps": 4,
    "checkpoint_period": 10**6,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    # With batch_invariant, each row holds one sequence and has at least 128 tokens. These runs have few rounds: enough
    # to measure the differences of log-probabilities and the time of a round, but not what the model learns.
    "batch_invariant": {
        "batch_invariant": "true",
        "max_target_length": 128,
        "max_prefill_predict_length": 119,
        "num_batches": 40,
        "eval_interval": 20,
    },
}
QUICK = {"batch_size": 4, "num_batches": 2, "eval_interval": 1, "eval_steps": 1, "warmup_steps_fraction": 0}
LOOKS = {"default": ("#0072B2", "-"), "batch_invariant": ("#D55E00", "--")}  # Okabe and Ito's colours
GOAL = 0.8


class Curve(NamedTuple):
    """A run's measurements.

    Attributes:
      points: (seconds, accuracy) of each evaluation.
      rounds: number of rounds.
      in_rollouts: the share of the step time that rollouts take.
      drift: the largest rollout_log_prob_max_diff.
      cpu_seconds: CPU time of the whole run.
    """

    points: list[tuple[float, float]]
    rounds: int
    in_rollouts: float
    drift: float
    cpu_seconds: float


def trained(folder: Path, program: str, name: str, keys: dict[str, Any]) -> Path:
    """Returns the folder of a run, which is trained first unless it is complete. The folder's file cpu_seconds contains
    the CPU time."""
    run, words = folder / "runs" / name, [f"{key}={value}" for key, value in {**keys, "run_name": name}.items()]
    if not (run / "cpu_seconds").exists():
        paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
            command = [sys.executable, "-m", program, "base.yml", *words]
            subprocess.run(command, cwd=folder, env=environment, check=True, stdout=log, stderr=subprocess.STDOUT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        (run / "cpu_seconds").write_text(f"{spent}\n")
        print(f"{name}: {time.monotonic() - began:.0f} s, {spent:.0f} s of CPU time", file=sys.stderr, flush=True)
    return run


def accuracy(run: Path) -> float:
    """Returns the accuracy at the end of a run."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return next(row["eval_reward"] for row in map(json.loads, reversed(lines)) if "eval_reward" in row)


def curve(run: Path, before: float) -> Curve:
    """Returns the curve of a run. `before`: the accuracy before its first round."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    points, seconds = [(0.0, before)], 0.0
    steps = [row for row in rows if "step_time" in row]
    for row in rows:
        # The first round, which compiles, is not counted.
        seconds += row.get("step_time", 0.0) if row["step"] else 0.0
        if "eval_reward" in row:
            points.append((seconds, row["eval_reward"]))
    later = steps[1:]
    share = sum(row["step_time"] * row["data_wait"] for row in later) / sum(row["step_time"] for row in later)
    drift = max(row["rollout_log_prob_max_diff"] for row in steps)
    return Curve(points, len(steps), share, drift, float((run / "cpu_seconds").read_text()))


def table(before: float, curves: dict[str, list[Curve]]) -> None:
    """Prints the table."""
    print(f"| | rounds | accuracy, before {before:.1%} | seconds to {GOAL:.0%} | seconds of a round |", end="")
    print(" CPU seconds of a run | time in rollouts | rollout_log_prob_max_diff |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, runs in curves.items():
        final = [run.points[-1][1] for run in runs]
        goals = [next((f"{at:.0f}" for at, share in run.points if share >= GOAL), "not reached") for run in runs]
        each = statistics.mean(run.points[-1][0] / (run.rounds - 1) for run in runs)
        cpu, share = (statistics.mean(run[i] for run in runs) for i in (4, 2))
        cells = (kind, runs[0].rounds, ", ".join(f"{value:.1%}" for value in final), ", ".join(goals), f"{each:.2f}")
        more = (f"{cpu:.0f}", f"{share:.0%}", f"{max(run.drift for run in runs):.2g}")
        print(f"| {' | '.join(map(str, cells + more))} |")


def plot(curves: dict[str, list[Curve]], file: str) -> None:
    """Draws the accuracy of each run against its seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for kind, runs in curves.items():
        color, style = LOOKS[kind]
        for number, run in enumerate(runs):
            panel.plot(*zip(*run.points, strict=True), style, color=color, label=None if number else kind)
    panel.set(xlabel="seconds of steps and rollouts", ylabel="greedy accuracy on held-out sums", ylim=(0, 1))
    seeds = counted(len(next(iter(curves.values()))), "seed")
    panel.set_title(f"GRPO on sums of two numbers below 100; {seeds}")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Trains the missing runs, then reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    folder = given.folder.absolute() / ("quick" if given.quick else "full")
    sums.write(folder / "sums")
    own = QUICK if given.quick else {}
    trained(folder, "trainer.train", "tuned", TASK | MODEL | TUNING | ({"steps": 20} if given.quick else {}))
    # One update with learning rate 0, so that the evaluation measures the accuracy before GRPO.
    first = {"learning_rate": 0, "num_batches": 1, "eval_interval": 1, "warmup_steps_fraction": 0}
    before = accuracy(trained(folder, "trainer.grpo", "before", TASK | GRPO | own | first))
    curves: dict[str, list[Curve]] = {kind: [] for kind in KINDS}
    for seed in SEEDS[:1] if given.quick else SEEDS:
        for kind, keys in KINDS.items():
            seeds = {"data_shuffle_seed": seed, "decode_sampling_seed": seed}
            run = trained(folder, "trainer.grpo", f"{kind}-{seed}", TASK | GRPO | keys | own | seeds)
            curves[kind].append(curve(run, before))
    table(before, curves)
    if given.plot:
        plot(curves, given.plot)


if __name__ == "__main__":
    main()
