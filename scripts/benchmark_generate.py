"""Compares the speed of generation with that of transformers' `generate` on this machine, and prints Markdown tables.

    pip install -e ".[goldens]" && python scripts/benchmark_generate.py [--tables speed] [--models 66M] [--repeats 5]

Tables:
  speed: CPU time of prompts and of decode steps, by model, dtype, batch size and sampling method. A ratio is the time
    of transformers divided by ours. Both programs have the same random weights and prompts. The greedy tokens of both
    are compared up to the first near tie.
  slots: decoded tokens per second of elapsed time with every slot in use, in float32.
  starts: elapsed time of complete `trainer.generate` processes, with an empty and with a filled JAX compilation cache.

Programs run in turns in one process, and each time is the minimum of the repeats. Only the table starts includes
compilation. CPU time includes all threads of the process. Run this on an idle machine: with other programs running on
two cores, a float32 step of transformers took two to six times as long, even in CPU time. The load is printed.
"""

import argparse
import functools
import gc
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from trainer.config.load import load
from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling
from trainer.inference.state import DecodeState
from trainer.inference.weights import canonical
from trainer.leaves.source import Leaf, names_of
from trainer.weights.huggingface.write import write_huggingface

MODELS = {
    "default": ["max_target_length=128"],
    "66M": [
        *("base_emb_dim=512", "base_num_query_heads=8", "base_num_kv_heads=8", "head_dim=64", "base_mlp_dim=1472"),
        *("base_num_decoder_layers=10", "vocab_size=32000", "max_target_length=256"),
    ],
    "300M": [
        *("base_emb_dim=1024", "base_num_query_heads=16", "base_num_kv_heads=8", "head_dim=64", "base_mlp_dim=2816"),
        *("base_num_decoder_layers=22", "vocab_size=32000", "max_target_length=256"),
    ],
}
DTYPES = ("float32", "bfloat16")
DRAWING = {"greedy": Sampling(0.0), "topk": Sampling(1.0, 50)}
LENGTH, NEW = 64, 33  # tokens of a prompt, and new tokens
SLOTS = (1, 8, 32)
# Two logits are a near tie if they differ by less than this share of the largest logit: a few rounding errors.
TIE = {"float32": 1e-4, "bfloat16": 2e-2}


class Cost(NamedTuple):
    """The CPU and elapsed seconds of a call, and its result."""

    cpu: float
    elapsed: float
    result: Any = None


def measured(program: Callable[[], Any]) -> Cost:
    """Returns the cost of a call."""
    time.sleep(0.05)  # wait until the previous program's threads have stopped spinning
    elapsed, cpu = time.perf_counter(), time.process_time()
    result = program()
    return Cost(time.process_time() - cpu, time.perf_counter() - elapsed, result)


def in_turns(programs: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, Cost]:
    """Returns the minimum CPU and elapsed seconds of each program, and its last result. A first round, which compiles,
    is not counted."""
    rounds = [{name: measured(program) for name, program in programs.items()} for _ in range(repeats + 1)]
    least = {}
    for name in programs:
        cpu, elapsed, results = zip(*(costs[name] for costs in rounds[1:]), strict=True)
        least[name] = Cost(min(cpu), min(elapsed), results[-1])
    return least


def generations_in_turns(generations: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, tuple[Cost, Cost]]:
    """Returns a dict from each name to a pair of costs: of processing the prompts up to their first tokens, and of one
    decode step. The field `result` of the first cost contains all generated tokens."""
    counts = list(itertools.product(generations, (1, NEW)))
    costs = in_turns({(name, new): functools.partial(generations[name], new) for name, new in counts}, repeats)
    found = {}
    for name in generations:
        first, whole = costs[name, 1], costs[name, NEW]
        step = Cost((whole.cpu - first.cpu) / (NEW - 1), (whole.elapsed - first.elapsed) / (NEW - 1))
        found[name] = (first._replace(result=whole.result), step)
    return found


def engine_of(model: str, dtype: str, slots: int, *keys: str) -> MaxEngine:
    """Returns the engine of a model with random weights."""
    fixed = ["base.yml", "dataset_type=synthetic", f"dtype={dtype}", f"weight_dtype={dtype}", "prompt="]
    return MaxEngine(load([*fixed, f"per_device_batch_size={slots}", *MODELS[model], *keys]).config)


def weights_of(engine: MaxEngine) -> Any:
    """Returns the weights, which are the same for all engines of a model and a dtype."""
    return engine.load_params(say=lambda line: None)


def prompts_of(model: str, count: int) -> list[list[int]]:
    """Returns `count` prompts of LENGTH tokens."""
    vocabulary = engine_of(model, "float32", 1).config.vocab_size
    return np.random.default_rng(0).integers(0, vocabulary, (count, LENGTH)).tolist()


def ours(engine: MaxEngine, params: Any, prompts: Sequence[list[int]], sampling: Sampling) -> Callable[[int], Any]:
    """Returns a function that generates n tokens after every prompt and returns them: int32 [b, n]."""

    def generate(new: int) -> np.ndarray:
        state, first = engine.init_decode_state(), []
        for slot, prompt in enumerate(prompts):
            padded = engine.padded(prompt)
            prefix, result = engine.prefill(params, padded, len(prompt), sampling=sampling, seed=slot)
            state = engine.insert(prefix, state, slot)
            first.append(result.tokens)
        jax.block_until_ready(state)
        return np.stack([np.concatenate(first), *decoded(engine, params, state, new - 1)], axis=1)

    return generate


def decoded(engine: MaxEngine, params: Any, state: DecodeState, steps: int) -> list[np.ndarray]:
    """Returns the tokens [slots] of each of the next `steps` decode steps. `state` is donated."""
    tokens = []
    for _ in range(steps):
        state, result = engine.generate(params, state)
        tokens.append(np.asarray(result.tokens))
    return tokens


def exported(folder: Path, engine: MaxEngine) -> Path:
    """Writes the engine's random weights as a Hugging Face directory, and returns it."""
    arrays = {name: np.asarray(value) for name, value in names_of(canonical(weights_of(engine))[0]).items()}
    leaves = {name: Leaf(it.shape, it.dtype, [functools.partial(np.asarray, it)]) for name, it in arrays.items()}
    folder.mkdir()
    write_huggingface(folder, engine.config, leaves, None)
    return folder


def loaded(folder: Path, dtype: str) -> Any:
    """Returns the model in `folder`, loaded by transformers."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def theirs(model: Any, prompts: Sequence[list[int]], sampling: Sampling, **more: Any) -> Callable[[int], Any]:
    """Returns the counterpart of `ours` for transformers. `more`: further arguments of `generate`, which may change
    what it returns."""
    import torch

    rows = torch.tensor(prompts)
    how = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": 1.0}
    how = how if sampling.temperature else {"do_sample": False}
    how |= {"attention_mask": torch.ones_like(rows), "pad_token_id": 0, "eos_token_id": None, **more}

    def generate(new: int) -> Any:
        with torch.no_grad():
            return model.generate(rows, max_new_tokens=new, **how)

    return generate


def agreement(tokens: np.ndarray, model: Any, prompts: Sequence[list[int]], tie: float) -> str:
    """Compares greedy `tokens` [b, n] with those of transformers, up to the first near tie of each row. Returns the
    result in words."""
    found = theirs(model, prompts, DRAWING["greedy"], output_logits=True, return_dict_in_generate=True)(NEW)
    expected = found.sequences[:, LENGTH:].numpy()
    ties = []
    for row in np.flatnonzero((tokens != expected).any(axis=1)):
        at = np.flatnonzero(tokens[row] != expected[row])[0]
        logits = found.logits[at][row].float().numpy()
        ties.append((logits.max() - logits[tokens[row, at]]) / np.abs(logits).max())
        if ties[-1] > tie:
            return f"row {row} differs at token {at}, by {ties[-1]:.1%} of the largest logit"
    return f"the same up to near ties in {len(ties)} rows, of {max(ties):.1%}" if ties else "the same"


def print_head(*columns: str) -> None:
    """Prints the head of a table."""
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def print_row(*cells: object) -> None:
    """Prints a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_speed(words: argparse.Namespace, scratch: Path) -> None:
    """Prints the table of speed."""
    measures = [
        (f"{what}, ms of CPU", "transformers", "ratio", "ratio of elapsed time") for what in ("prompts", "step")
    ]
    print_head("model", "dtype", "batch", "drawing", "scan_layers", *itertools.chain(*measures), "tokens")
    for model, dtype in itertools.product(words.models, words.dtypes):
        reference = loaded(exported(scratch / f"{model}-{dtype}", engine_of(model, dtype, 1)), dtype)
        for batch in words.batches:
            prompts = prompts_of(model, batch)
            engines = {scan: engine_of(model, dtype, batch, f"scan_layers={scan}") for scan in ("true", "false")}
            weights = {scan: weights_of(engine) for scan, engine in engines.items()}
            for drawing in words.drawing:
                how = DRAWING[drawing]
                programs = {scan: ours(engine, weights[scan], prompts, how) for scan, engine in engines.items()}
                costs = generations_in_turns({"": theirs(reference, prompts, how), **programs}, words.repeats)
                for scan in engines:
                    greedy, tokens = drawing == "greedy", costs[scan][0].result
                    same = agreement(tokens, reference, prompts, TIE[dtype]) if greedy else ""
                    cells = itertools.chain(*map(compared, costs[scan], costs[""]))
                    print_row(model, dtype, batch, drawing, scan, *cells, same)
            del engines, weights, programs
            gc.collect()  # reference cycles keep the engines and their weights alive


def compared(cost: Cost, other: Cost) -> tuple[str, ...]:
    """Returns the table cells that compare our cost with that of transformers."""
    times = f"{1e3 * cost.cpu:.2f}", f"{1e3 * other.cpu:.2f}"
    return (*times, f"{other.cpu / cost.cpu:.2f}", f"{other.elapsed / cost.elapsed:.2f}")


def print_slots(words: argparse.Namespace, scratch: Path) -> None:
    """Prints the table of slots."""
    print_head("tokens/s of decode steps", *(f"slots: {slots}" for slots in SLOTS))
    for model in words.models:
        speeds = []
        for slots in SLOTS:
            engine = engine_of(model, "float32", slots)
            params, prompt = weights_of(engine), prompts_of(model, 1)[0]
            prefix, _ = engine.prefill(params, engine.padded(prompt), LENGTH, sampling=DRAWING["greedy"])
            seconds = []
            for _ in range(words.repeats + 1):
                state = engine.init_decode_state()
                for slot in range(slots):
                    state = engine.insert(prefix, state, slot)
                jax.block_until_ready(state)
                seconds.append(measured(functools.partial(decoded, engine, params, state, NEW)).elapsed)
            speeds.append(f"{slots * NEW / min(seconds[1:]):.0f}")
        print_row(model, *speeds)


def print_starts(words: argparse.Namespace, scratch: Path) -> None:
    """Prints the table of starts, for the default model."""
    print_head("start of trainer.generate, default model", "ready, s", "first token, s later", "process, s")
    folder = exported(scratch / "start", engine_of("default", "float32", 1))
    keys = ["prompt=def", "tokenizer_type=bytes", "max_target_length=64", "decode_sampling_strategy=greedy"]
    command = [sys.executable, "-m", "trainer.generate", str(folder), *keys]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(scratch / "programs"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for how in ("without a cache", "with a cache"):
        began = time.perf_counter()
        done = subprocess.run(command, env=os.environ | cache, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        found = re.search(r"ready after ([\d.]+) s, the first token ([\d.]+) s later", done.stderr)
        assert found, done.stderr
        print_row(how, *found.groups(), f"{seconds:.1f}")


TABLES = {"speed": print_speed, "slots": print_slots, "starts": print_starts}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--drawing", nargs="+", choices=DRAWING, default=[*DRAWING])
    parser.add_argument("--repeats", type=int, default=5)
    words = parser.parse_args()
    import torch
    import transformers

    versions = f"jax {jax.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        for table in words.tables:
            TABLES[table](words, Path(folder))


if __name__ == "__main__":
    main()
