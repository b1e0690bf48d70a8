"""Saves the logits of a teacher for all training rows, in the format of `data.teacher_logits`."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.checkpoint.base import digests
from trainer.config.capabilities.context_keys import token_order
from trainer.config.capabilities.invariant_keys import compiler_options
from trainer.config.derived import microbatch_rows
from trainer.config.errors import UserError
from trainer.config.words import counted
from trainer.data.bar import Bar
from trainer.data.batches import Batch
from trainer.data.dataset import Dataset
from trainer.data.teacher_logits import SHARD_BYTES, Facts, hash_of_rows, rows_of, writer
from trainer.objectives.distillation import PARAMS, REST, Distillation
from trainer.objectives.saved_logits import LOGITS, OTHERS, TOKENS
from trainer.objectives.tiling import in_tiles
from trainer.ops.divergence import first_tokens, with_others
from trainer.ops.order import in_true_order
from trainer.ops.paths import by_path
from trainer.training.batches import placed
from trainer.training.run import Run


def save_logits(run: Run, dataset: Dataset, load: Callable[[], Any], say: Callable[[str], None]) -> None:
    """Computes the logits of the teacher of `run` for all training rows, one microbatch at a time, and writes them to
    the folder save_teacher_logits. Keeps shards that an earlier call completed. `load` returns the teacher's weights.

    Raises:
      UserError: there are several processes, the rows have no fixed order, or the folder cannot be written.
    """
    config, objective = run.config, run.objective
    if jax.process_count() > 1:
        raise UserError(
            "save_teacher_logits: only one process can save logits; any number of processes can train from them"
        )
    source, count = rows_of(dataset, "save_teacher_logits")
    whole = config.teacher_logits_k >= run.objective.teacher.vocab_size  # type: ignore[attr-defined]
    if not whole and config.distill_temperature_schedule != "constant":
        raise UserError("distill_temperature_schedule must be constant, unless all logits are saved; leave it out")
    frozen = load()
    teacher, size = objective.teacher, microbatch_rows(config)  # type: ignore[attr-defined]
    step = _saver(run, teacher.vocab_size if whole else min(config.teacher_logits_k, teacher.tokens), whole)

    def batch_of(indices: np.ndarray) -> Batch:
        rows = np.pad(indices, (0, size - len(indices)), mode="edge")
        return {**source.rows(rows), "row": np.arange(size, dtype=np.int32)}

    def values(indices: np.ndarray) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = jax.device_get(step(frozen, placed(run, batch_of(indices))))
        if moved := token_order(config):
            strategy, n = moved
            found = {name: in_true_order(value, n, strategy) for name, value in found.items()}
        return {name: value[: len(indices)] for name, value in found.items()}

    logits = jax.eval_shape(step, frozen, placed(run, batch_of(np.arange(1))))[LOGITS]
    facts = Facts(
        data=hash_of_rows(dataset),
        rows=count,
        length=source.length,
        k=logits.shape[-1],
        vocab_size=teacher.vocab_size,
        tokens=teacher.tokens,
        temperature=config.distill_temperature,
        dtype=logits.dtype.name,
        teacher=hashlib.sha256(json.dumps(digests(by_path(frozen)), sort_keys=True).encode()).hexdigest(),
    )
    facts.check()
    batches_of_shard = max(1, SHARD_BYTES // (facts.record.itemsize * size))
    facts = dataclasses.replace(facts, shard_rows=batches_of_shard * size)
    with writer(config.save_teacher_logits, facts, config.teacher_path) as (left, write), Bar(say, "logits") as bar:
        done = count - sum(map(len, left.values()))
        bar.start(done / count)

        def batches(rows: range) -> Iterator[Mapping[str, np.ndarray]]:
            nonlocal done
            for first in range(rows.start, rows.stop, size):
                indices = np.arange(first, min(first + size, rows.stop))
                yield values(indices)
                done += len(indices)
                bar(done / count)

        for name, rows in left.items():
            write(name, batches(rows))
    say(f"{config.save_teacher_logits}: {_summary(facts, len(left))}")


def _summary(facts: Facts, made: int) -> str:
    """Returns a description of the folder's contents. `made`: the number of shards that this command wrote."""
    each, shards = facts.record.itemsize, len(facts.bounds())
    before = f"; {shards - made} of {shards} shards were saved before" if made < shards else ""
    return (
        f"{counted(facts.rows, 'row')} with {facts.k:,} of {facts.vocab_size:,} logits, "
        f"{each / facts.length:,.0f} bytes per token, {each * facts.rows:,} bytes{before}"
    )


def _saver(run: Run, k: int, whole: bool) -> Callable[..., dict[str, jax.Array]]:
    """Returns a jitted function `(frozen, batch) -> fields`. `fields` are the batch fields with the k largest logits of
    each token.

    `whole`: whether `fields` contain all logits instead, in the order of the vocabulary.
    """
    objective: Distillation = run.objective  # type: ignore[assignment]
    teacher, temperature = objective.teacher, run.config.distill_temperature

    def largest(params: Any, rest: Any, hidden_bte: jax.Array, _: Any) -> dict[str, jax.Array]:
        logits = teacher.apply(params, rest, hidden_bte, method="head")[0]
        if whole:
            return {LOGITS: logits}
        tempered, shared = first_tokens(teacher.tokens, logits.astype(jnp.float32) / temperature, logits)
        found, tokens = jax.lax.top_k(shared, k)
        return {LOGITS: found, TOKENS: tokens, OTHERS: with_others(tempered, tokens)[..., -1]}

    def step(frozen: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        frozen = run.frozen.fetch(frozen)
        hidden_bte = objective.teacher_hidden(frozen, batch)
        weights = frozen[PARAMS], frozen[REST]
        if teacher.tiling is None:
            return largest(*weights, hidden_bte, ())
        return in_tiles(largest, teacher.tiling, *weights, hidden_bte, ())

    options = compiler_options(run.config, run.mesh.devices.flat[0].platform)
    return jax.jit(run.sharded(step), compiler_options=options)
