"""Asks `trainer.plan` random questions, with the real compiler: `python scripts/ask_plans.py --questions 20 --seed 0`.

Each question searches random keys of a tiny model, for random TPUs or GPUs and with a random objective. It must end
with an answer, with the verdict that nothing fits (exit code 3), or with one error message (exit code 2). For each
answer, a separate train_compile of the printed settings must need as much memory as the plan printed, and the printed
command must start with --dry-run on simulated devices. The script needs libtpu and JAX's plugin for CUDA, and about a
minute per question on two cores.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from check_plan import TINY

from trainer.aot.report import DOES_NOT_FIT
from trainer.config.topologies import topologies

ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}
# Values of keys for random questions; trainer.train refuses some, alone or in combination.
VALUES = {
    "remat_policy": ["full", "minimal", "minimal_offloaded", "custom", "none"],
    "per_device_batch_size": ["0.25", "1", "4", "100000"],
    "num_vocab_tiling": ["1", "-1", "7"],
    "ici_tensor_parallelism": ["1", "2", "4", "-1"],
    "ici_pipeline_parallelism": ["1", "2"],
    "ici_context_parallelism": ["1", "2"],
    "shard_optimizer_over_data": ["true", "false"],
    "optimizer_memory_host_offload": ["true", "false"],
    "gradient_accumulation_steps": ["1", "2"],
    "attention": ["flash", "dot_product"],
    "decoder_block": ["llama2", "gemma3", "qwen3"],
    "opt_type": ["adamw", "muon", "sgd"],
    "scan_layers": ["true", "false"],
    "enable_diloco": ["true", "false"],
    "trainable_parameters_mask": ["[embedding]", "[norm,mlp]"],
    "vocab_size": ["1024", "1000"],
}
NARROW = ("remat_policy", "num_vocab_tiling", "optimizer_memory_host_offload")  # searched in every question
LAYERS = "base_num_decoder_layers=2"


def main() -> None:
    """Asks, prints a line for each question, and exits with 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first question; others have the next seeds")
    given = parser.parse_args()
    wrong = 0
    for seed in range(given.seed, given.seed + given.questions):
        words = question(seed)
        with tempfile.TemporaryDirectory() as folder:
            said, mistakes = ask(words, Path(folder))
        wrong += bool(mistakes)
        print(f"seed {seed}: {said}: {shlex.join(words)}", flush=True)
        for mistake in mistakes:
            print(f"  WRONG: {mistake}", flush=True)
    print(f"{given.questions} questions, {wrong} wrong")
    sys.exit(1 if wrong else 0)


def question(seed: int) -> list[str]:
    """Returns the arguments of a random plan."""
    draw = random.Random(seed)
    fixed, *searched = draw.sample(sorted(VALUES), 3)
    words = [f"compile_topology={draw.choice(['v4-8', 'v5p-8', 'v6e-4', 'h100-4', 'a100-2'])}"]
    words += ["compile_topology_num_slices=2"] if draw.random() < 0.3 else []
    words += [f"{fixed}={draw.choice(VALUES[fixed])}"]
    for key in dict.fromkeys([*searched, *(key for key in NARROW if key != fixed)]):
        words.append(f"search.{key}={','.join(draw.sample(VALUES[key], min(2, len(VALUES[key]))))}")
    words += [f"objective={draw.choice(['tokens', 'batch'])}", f"compiles={draw.choice([1, 2, 3])}"]
    words += [f"global_batch_tokens={draw.choice([1024, 4096, 1000])}"] if draw.random() < 0.3 else []
    return words


def ask(words: Sequence[str], folder: Path) -> tuple[str, list[str]]:
    """Returns what the plan answers, in words, and the mistakes in it."""
    named = {word.partition("=")[0] for word in words}
    tiny: Any = [word for word in (*TINY, LAYERS) if word.partition("=")[0] not in named]
    tiny = list(dict(word.partition("=")[::2] for word in tiny).items())
    model = [f"{key}={value}" for key, value in tiny if f"search.{key}" not in named]
    journal = f"journal={folder / 'plan.jsonl'}"
    plan = run("trainer.plan", "base.yml", *model, *words, journal, "--json", folder=folder)
    if plan.returncode not in (0, 2, DOES_NOT_FIT) or "Traceback" in plan.stderr:
        return f"exit {plan.returncode}", [plan.stderr[-2000:]]
    if plan.returncode == 2:
        return f"refused ({' '.join(plan.stderr.split())[-160:]})", []
    answer = json.loads(plan.stdout)
    outcomes = [found["outcome"] for found in answer["candidates"]]
    if not answer["best"]:
        return f"no winner, {outcomes}", []
    return f"{answer['best']['tokens_per_second']:.0f} tokens/s, {outcomes}", mistakes_of(answer, words, folder)


def mistakes_of(answer: dict[str, Any], words: Sequence[str], folder: Path) -> list[str]:
    """Returns the mistakes in an answer: its memory, and its command line."""
    _, _, _, *settings = shlex.split(answer["command"])
    target = [word for word in words if word.startswith("compile_topology")]
    report = folder / "report.json"
    run("trainer.train_compile", *settings, *target, f"compile_report_file={report}", folder=folder)
    there, here = json.loads(report.read_text())["peak_bytes"], answer["best"]["row"]["report"]["peak_bytes"]
    found = [] if here == there else [f"{here} bytes, train_compile {there}"]
    slices = 2 if "compile_topology_num_slices=2" in words else 1
    devices = topologies()[target[0].partition("=")[2]].devices * slices
    if slices == 1:  # simulated devices are one slice
        start = run("trainer.train", *settings, "--dry-run", folder=folder, devices=devices)
        found += [] if start.returncode == 0 else [f"--dry-run: {start.stderr[-1000:]}"]
    return found


def run(module: str, *words: str, folder: Path, devices: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs a command in `folder`, with `devices` simulated CPU devices."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT | flags, capture_output=True, text=True)


if __name__ == "__main__":
    main()
