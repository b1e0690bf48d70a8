"""Measures the cost and the effect of `batch_invariant` on this machine, and prints Markdown tables.

    python scripts/benchmark_batch_invariant.py [--tables training] [--models 66M] [--dtypes float32] [--repeats 5]

Tables:
  training: CPU time of a training step.
  decoding: CPU time of a decode step, for several batch sizes.
  bits: differences between the log-probabilities that generation returns with its tokens and those that the forward
    pass of a training step computes for the same sequences. Generation serves prompts and answers of different lengths
    in 8 slots; a training row holds two sequences.

Every table compares runs with and without `batch_invariant`. Programs run in turns, and each time is the minimum of the
repeats.
"""

import argparse
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_default import batch_of, built
from benchmark_generate import (
    DRAWING,
    DTYPES,
    MODELS,
    engine_of,
    generations_in_turns,
    in_turns,
    ours,
    print_head,
    print_row,
    prompts_of,
    weights_of,
)

from trainer.config.capabilities.invariant_keys import compiler_options
from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling
from trainer.inference.scheduler import Scheduler
from trainer.inference.weights import canonical
from trainer.objectives.forward import hidden_states
from trainer.objectives.next_token import NextToken
from trainer.training.run import Run

KEYS = {"without": "batch_invariant=false", "with": "batch_invariant=true"}
LENGTH = 512  # tokens of a training row, and the maximum length of a sequence
ROOM = LENGTH // 2  # maximum tokens of each of the two sequences in a row


def training(model: str, dtype: str, key: str) -> Callable[[], Any]:
    """Returns a function that runs a training step, with 8 rows of the default model or 2 of a larger one."""
    run = built("base.yml", *MODELS[model], f"per_device_batch_size={8 if model == 'default' else 2}", dtype, key)
    step, state, batch = run.compile(), [run.init()], batch_of(run)

    def train() -> None:
        state[0], metrics = step(state[0], batch, ())
        jax.block_until_ready((state[0], metrics))

    return train


def print_training(words: argparse.Namespace) -> None:
    """Prints the table of training steps."""
    print_head("model", "dtype", "training step without, ms of CPU", "with", "ratio")
    for model, dtype in itertools.product(words.models, words.dtypes):
        programs = {how: training(model, f"dtype={dtype}", key) for how, key in KEYS.items()}
        costs = in_turns(programs, words.repeats)
        print_row(model, dtype, *compared(*(costs[how].cpu for how in KEYS)))


def print_decoding(words: argparse.Namespace) -> None:
    """Prints the table of decode steps."""
    print_head("model", "dtype", "batch", "decode step without, ms of CPU", "with", "ratio")
    for model, dtype, batch in itertools.product(words.models, words.dtypes, words.batches):
        programs = {}
        for how, key in KEYS.items():
            engine = engine_of(model, dtype, batch, key)
            programs[how] = ours(engine, weights_of(engine), prompts_of(model, batch), DRAWING["greedy"])
        costs = generations_in_turns(programs, words.repeats)
        print_row(model, dtype, batch, *compared(*(costs[how][1].cpu for how in KEYS)))


def compared(without: float, with_key: float) -> tuple[str, ...]:
    """Converts two times in seconds to table cells: both times in milliseconds, and their ratio."""
    return f"{1e3 * without:.2f}", f"{1e3 * with_key:.2f}", f"{with_key / without:.2f}"


def rollouts(engine: MaxEngine, weights: Any, prompts: Sequence[list[int]], limits: Sequence[int]) -> list[tuple]:
    """Returns a pair for each prompt: the generated tokens, and their log-probabilities."""
    scheduler = Scheduler(engine, weights)
    pairs = enumerate(zip(prompts, limits, strict=True))
    numbers = [scheduler.submit(it, limit=limit, sampling=Sampling(1.0), seed=i) for i, (it, limit) in pairs]
    found: dict[int, tuple[list, list]] = {number: ([], []) for number in numbers}
    for event in scheduler.run():
        if event.token is not None:
            found[event.request][0].append(event.token)
            found[event.request][1].append(event.log_prob)
    return [found[number] for number in numbers]


def row_of(engine: MaxEngine, sequences: Sequence[list[int]]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns a training row with `sequences`, packed as `batch_invariant` requires, and the start of each sequence."""
    inputs, targets = (engine.packed([sequence[part] for sequence in sequences]) for part in (np.s_[:-1], np.s_[1:]))
    segments = inputs.decoder_segment_ids
    fields = {"inputs": inputs.padded_tokens, "inputs_position": inputs.decoder_positions}
    fields |= {"inputs_segmentation": segments, "targets": targets.padded_tokens, "targets_segmentation": segments}
    return {name: np.pad(row, (0, LENGTH - row.size)) for name, row in fields.items()}, inputs.start_pos


def trained(run: Run, variables: tuple, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the log-probabilities [b, t] of the targets, from a program that also computes gradients."""
    options = compiler_options(run.config, jax.default_backend())

    @functools.partial(jax.jit, compiler_options=options)
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params: Any, rest: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, _ = hidden_states(run.model.apply, params, rest, batch, None, ())
        assert isinstance(run.objective, NextToken)
        terms, logs = run.objective.token_terms(params, rest, hidden, batch["targets"])
        return jnp.sum(jnp.where(batch["targets_segmentation"] != 0, terms["lm_loss"], 0)), logs.target

    return np.asarray(loss(*variables, batch)[0][1])


def differences(model: str, dtype: str, key: str, requests: int) -> np.ndarray:
    """Returns |log-probability of generation - log-probability of training| for every token of the answers."""
    keys = [*MODELS[model], f"max_target_length={LENGTH}", key]
    engine = engine_of(model, dtype, 8, *keys, "weight_dtype=float32", "return_log_prob=true")
    weights, draw = weights_of(engine), np.random.default_rng(0)
    lengths, limits = draw.integers(3, ROOM // 2, (2, requests)).tolist()
    prompts = [draw.integers(0, engine.config.vocab_size, length).tolist() for length in lengths]
    answers = rollouts(engine, weights, prompts, limits)
    sequences = [prompt + tokens for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
    rows, starts = zip(*(row_of(engine, sequences[i : i + 2]) for i in range(0, requests, 2)), strict=True)
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]} | {"row": np.arange(len(rows))}
    run = built("base.yml", *keys, f"dtype={dtype}", f"per_device_batch_size={len(rows)}")
    found, apart = trained(run, canonical(weights), batch), []
    for i, (prompt, (tokens, log_probs)) in enumerate(zip(prompts, answers, strict=True)):
        begin = starts[i // 2][i % 2] + len(prompt) - 1
        apart.append(np.abs(found[i // 2, begin : begin + len(tokens)] - np.asarray(log_probs, np.float32)))
    return np.concatenate(apart)


def print_bits(words: argparse.Namespace) -> None:
    """Prints the table of log-probabilities."""
    print_head("model", "dtype", "batch_invariant", "log-probabilities", "differ", "largest difference")
    for model, dtype, key in itertools.product(words.models, words.dtypes, KEYS.values()):
        apart = differences(model, dtype, key, words.requests)
        print_row(model, dtype, key.split("=")[1], apart.size, np.count_nonzero(apart), f"{apart.max():.2g}")


TABLES = {"training": print_training, "decoding": print_decoding, "bits": print_bits}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["default", "66M"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24, help="number of requests for the table `bits`")
    words = parser.parse_args()
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for table in words.tables:
        TABLES[table](words)


if __name__ == "__main__":
    main()
