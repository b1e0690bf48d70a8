"""Measures generation on this machine: first token and speed against transformers' generate, slots, and starts.

    pip install -e ".[goldens]" && python scripts/benchmark_generate.py [--repeats 5]

Both programs have the same random float32 weights, the same prompts, and draw greedily; their tokens are compared. They
take turns, and the fastest of the repeats counts, so that other work on the machine matters less. Compilation is not in
the times, except in the starts: those are complete processes of `trainer.generate`, without and with JAX's cache of
compiled programs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import torch
import transformers

from trainer.checkpoint import Leaf, names_of, write_huggingface
from trainer.config import load
from trainer.inference import MaxEngine, Sampling, Scheduler, canonical

GREEDY = Sampling(0.0)
DEFAULT = ["max_target_length=128"]
LARGER = [
    *("base_emb_dim=512", "base_num_query_heads=8", "base_num_kv_heads=8", "head_dim=64", "base_mlp_dim=1472"),
    *("base_num_decoder_layers=10", "vocab_size=32000", "max_target_length=256"),
]
MODELS = {"default model": DEFAULT, "66 M": LARGER}
SLOTS = (1, 8, 32)
STEPS = 40  # decode steps of the measurement of slots


def engine_of(keys: list[str], slots: int) -> MaxEngine:
    """Returns the engine of a model with random weights."""
    fixed = ["base.yml", "dataset_type=synthetic", "dtype=float32", f"per_device_batch_size={slots}", "prompt="]
    return MaxEngine(load([*fixed, *keys]).config)


def theirs(folder: Path, engine: MaxEngine, params: tuple) -> torch.nn.Module:
    """Returns the model of transformers with the same weights."""
    arrays = {name: np.asarray(value) for name, value in names_of(canonical(params)[0]).items()}
    leaves = {name: Leaf(value.shape, value.dtype, [lambda value=value: value]) for name, value in arrays.items()}
    folder.mkdir()
    write_huggingface(folder, engine.config, leaves, None, {})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ours_timed(scheduler: Scheduler, prompt: list[int], count: int) -> tuple[list[int], float, float]:
    """Returns the tokens, the seconds to the first one, and tokens/s after it."""
    began = time.perf_counter()
    scheduler.submit(prompt, limit=count, sampling=GREEDY)
    tokens, first = [], 0.0
    for event in scheduler.run():
        first = first or time.perf_counter() - began
        tokens.append(event.token)
    return tokens, first, (count - 1) / (time.perf_counter() - began - first)


def theirs_timed(model: torch.nn.Module, prompt: list[int], count: int) -> tuple[list[int], float, float]:
    """See `ours_timed`."""
    row = torch.tensor([prompt])
    how = {"do_sample": False, "attention_mask": torch.ones_like(row), "pad_token_id": 0, "eos_token_id": None}
    seconds, tokens = [], []
    for new in (1, count):
        began = time.perf_counter()
        with torch.no_grad():
            tokens = model.generate(row, max_new_tokens=new, **how)[0, len(prompt) :].tolist()
        seconds.append(time.perf_counter() - began)
    return tokens, seconds[0], (count - 1) / (seconds[1] - seconds[0])


def best(results: list[tuple[list[int], float, float]]) -> tuple[float, float]:
    """Returns the least seconds to the first token and the most tokens/s."""
    return min(first for _, first, _ in results), max(speed for _, _, speed in results)


def compare(name: str, keys: list[str], repeats: int, scratch: Path) -> None:
    """Prints the row of a model."""
    engine = engine_of(keys, 1)
    params = engine.load_params(say=lambda line: None)
    model, scheduler = theirs(scratch / name.replace(" ", "-"), engine, params), Scheduler(engine, params)
    length = engine.config.max_target_length
    prompt = np.random.default_rng(0).integers(0, engine.config.vocab_size, length // 4).tolist()
    count = length // 2
    runs: dict[Callable, list] = {ours_timed: [], theirs_timed: []}
    for _ in range(repeats + 1):
        runs[ours_timed].append(ours_timed(scheduler, prompt, count))
        runs[theirs_timed].append(theirs_timed(model, prompt, count))
    same = runs[ours_timed][0][0] == runs[theirs_timed][0][0]
    (first, speed), (their_first, their_speed) = (best(results[1:]) for results in runs.values())
    size = sum(leaf.size for leaf in jax.tree.leaves(params[0]))
    print(
        f"| {name}, {size / 1e6:.1f} M parameters | {len(prompt)} + {count} "
        f"| {first * 1e3:.1f} | {their_first * 1e3:.1f} "
        f"| {speed:.0f} | {their_speed:.0f} | {speed / their_speed:.2f} | {'the same' if same else 'differ'} |",
        flush=True,
    )


def slots(name: str, keys: list[str], repeats: int) -> None:
    """Prints tokens/s of decode steps with every slot in use."""
    found = []
    for count in SLOTS:
        engine = engine_of(keys, count)
        params = engine.load_params(say=lambda line: None)
        prefix, _ = engine.prefill(params, engine.padded([1, 2, 3]), 3, sampling=GREEDY)
        speeds = []
        for _ in range(repeats + 1):
            state = engine.init_decode_state()
            for slot in range(count):
                state = engine.insert(prefix, state, slot)
            state, result = engine.generate(params, state)
            jax.block_until_ready(result)
            began = time.perf_counter()
            for _ in range(STEPS):
                state, result = engine.generate(params, state)
            jax.block_until_ready(result)
            speeds.append(count * STEPS / (time.perf_counter() - began))
        found.append(max(speeds[1:]))
    print(f"| {name} | {' | '.join(f'{speed:.0f}' for speed in found)} |", flush=True)


def starts(folder: Path, scratch: Path) -> None:
    """Prints what `trainer.generate` takes as a process."""
    words = [
        str(folder),
        "prompt=def",
        "tokenizer_type=bytes",
        "max_target_length=64",
        "decode_sampling_strategy=greedy",
    ]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(scratch / "programs")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for how in ("cold", "warm"):
        began = time.perf_counter()
        command = [sys.executable, "-m", "trainer.generate", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        found = re.search(r"ready after ([\d.]+) s, the first token ([\d.]+) s later", done.stderr)
        assert found, done.stderr
        print(f"| {how} | {found[1]} | {found[2]} | {seconds:.1f} |", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    transformers.utils.logging.disable_progress_bar()
    print(f"jax {jax.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, float32\n")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        print(
            "| model | prompt + new tokens | first token, ms | transformers | tokens/s after it | transformers | ratio "
            "| tokens |"
        )
        for name, keys in MODELS.items():
            compare(name, keys, repeats, scratch)
        print(f"\n| tokens/s of decode steps | {' | '.join(f'slots: {count}' for count in SLOTS)} |")
        for name, keys in MODELS.items():
            slots(name, keys, repeats)
        print("\n| start of trainer.generate, default model | ready, s | first token, s later | process, s |")
        starts(scratch / next(iter(MODELS)).replace(" ", "-"), scratch)


if __name__ == "__main__":
    main()
