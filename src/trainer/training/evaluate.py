"""Computes the loss on held-out rows."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config.errors import RunStopped, UserError
from trainer.config.words import counted
from trainer.data.batches import RowSource, eval_batches
from trainer.objectives.base import Mean, Objective, frozen_argument
from trainer.observe.text import perplexity
from trainer.state.shardings import ParamShardings


def make_evaluation(objective: Objective, shardings: ParamShardings) -> Callable[..., dict[str, Any]]:
    """Returns `evaluation(params, rest, batch, frozen, bytes_per_token [vocab]) -> sums`.

    `sums` has two entries, which are sums over `batch`: `means`, an `objectives.Evaluation`, and `bytes`, the number of
    text bytes in the targets (0 if the objective has no cross entropy).
    """

    def evaluation(
        params: Any, rest: Any, batch: Mapping[str, jax.Array], frozen: Any, bytes_per_token: jax.Array
    ) -> dict[str, Any]:
        params = jax.lax.with_sharding_constraint(params, shardings.compute)
        means = objective.evaluation(params, rest, batch, **frozen_argument(objective, frozen))
        lengths = jnp.zeros((), bytes_per_token.dtype)
        if means.cross_entropy is not None:
            lengths = jnp.where(batch["targets_segmentation"] != 0, bytes_per_token[batch["targets"]], 0)
        return {"means": means, "bytes": jnp.sum(lengths)}

    return evaluation


def check_held_out(rows: RowSource | None, batch_rows: int, eval_steps: int) -> None:
    """Raises UserError if no token of the first `eval_steps` batches of `batch_rows` rows contributes to the loss.

    Stops reading at the first batch in which a token contributes to the loss. If `eval_steps` is -1, nothing is read,
    because all held-out rows are evaluated, and prepared data always contain a token that contributes to the loss.
    """
    if rows is None or eval_steps < 0:
        return
    tokens = 0
    for batch in eval_batches(rows, batch_rows, eval_steps):
        if batch["targets_segmentation"].any():
            return
        tokens += int(np.count_nonzero(batch["inputs_segmentation"]))
    batches = f"{counted(eval_steps, 'evaluation batch', 'evaluation batches')} of {counted(batch_rows, 'row')}"
    raise UserError(
        f"eval_steps={eval_steps}: 0 of {tokens:,} tokens contribute to the loss in the first {batches}, so there is "
        "nothing to evaluate on; set a larger eval_steps, or -1 for all held-out rows"
    )


def summarize(sums: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the metrics over all batches. `sums`: for each batch, the result of `evaluation`; see `make_evaluation`.

    The metrics are eval_loss, eval_tokens and the objective's other means. An objective with a cross entropy adds
    eval_perplexity and, if the targets are text, eval_bits_per_byte. The end-of-document token adds bits but no bytes.

    Raises RunStopped if no token contributes to the loss, because a loss of 0 would count as the best loss.
    """
    total: Any = None
    for batch in sums:
        found = jax.tree.map(float, batch)
        total = found if total is None else jax.tree.map(operator.add, total, found)
    if total is None or not total["means"].loss.weight:
        raise RunStopped(
            "evaluation: 0 tokens contribute to the loss in its batches; evaluate on other data, "
            "or set eval_interval=-1"
        )
    tokens, loss, nats, others = total["means"]
    metrics = {"eval_loss": _mean(loss)}
    if nats is not None and nats.weight:
        metrics["eval_perplexity"] = perplexity(_mean(nats))
    metrics["eval_tokens"] = int(tokens)
    metrics |= {f"eval_{name}": _mean(mean) for name, mean in (others or {}).items()}
    if nats is not None and nats.weight and total["bytes"]:
        metrics["eval_bits_per_byte"] = nats.total / math.log(2) / total["bytes"]
    return metrics


def _mean(mean: Mean) -> float:
    total, weight = map(float, mean)
    return total / weight if weight else 0.0
