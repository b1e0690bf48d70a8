"""Loss on held-out rows."""

import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from trainer.backends import TrainTree
from trainer.config import RunStopped, UserError
from trainer.data import RowSource, eval_batches
from trainer.objectives import Objective
from trainer.observe import perplexity
from trainer.state import ParamShardings


def make_evaluation(objective: Objective, shardings: ParamShardings) -> Callable[..., dict[str, jax.Array]]:
    """`evaluation(tree, batch, bytes_per_token [vocab]) -> sums` over the loss-bearing tokens of `batch`: those of
    `Objective.evaluation`, the number of tokens, and the bytes that their targets stand for."""

    def evaluation(tree: TrainTree, batch: Mapping[str, jax.Array], bytes_per_token: jax.Array) -> dict[str, jax.Array]:
        params = jax.lax.with_sharding_constraint(tree.params, shardings.compute)
        sums = objective.evaluation(params, tree.rest, batch)
        bears_loss = batch["targets_segmentation"] != 0
        return {
            **sums,
            "tokens": objective.weights(batch)["lm_loss"],
            "bytes": jnp.sum(jnp.where(bears_loss, bytes_per_token[batch["targets"]], 0)),
        }

    return evaluation


def check_held_out(rows: RowSource | None, batch_rows: int, eval_steps: int) -> None:
    """Raises UserError where none of the first `eval_steps` batches of `batch_rows` rows has a token that bears loss.

    It reads to the first that has one. All batches together, `eval_steps` -1, have one: else they are not prepared.
    """
    if rows is None or eval_steps < 0:
        return
    tokens = 0
    for batch in eval_batches(rows, batch_rows, eval_steps):
        if batch["targets_segmentation"].any():
            return
        tokens += int(np.count_nonzero(batch["inputs_segmentation"]))
    raise UserError(
        f"eval_steps={eval_steps}: 0 of {tokens:,} tokens bear loss in the first {eval_steps} evaluation batches of "
        f"{batch_rows} rows, so there is nothing to evaluate on; set a larger eval_steps, or -1 for all held-out rows"
    )


def summarize(sums: Iterable[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Metrics over all batches, weighted by token: eval_loss (nats per token), eval_perplexity, eval_tokens and, where
    the targets stand for bytes, eval_bits_per_byte (document ends cost bits and stand for no byte). Where a module of
    multi-token prediction is evaluated, eval_mtp_acceptance_rate, which is 0 where it predicts no token.

    Raises RunStopped where no token bears loss: there is no mean of nothing, and 0 would be the best loss of all."""
    totals = {"nats": 0.0, "tokens": 0.0, "bytes": 0.0}
    for batch in sums:
        for name, value in batch.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    if not totals["tokens"]:
        raise RunStopped(
            "evaluation: 0 tokens bear loss in its batches; evaluate on other data, or set eval_interval=-1"
        )
    loss = totals["nats"] / totals["tokens"]
    metrics = {
        "eval_loss": loss,
        "eval_perplexity": perplexity(loss),
        "eval_tokens": int(totals["tokens"]),
    }
    if "mtp_predicted" in totals:
        metrics["eval_mtp_acceptance_rate"] = totals["mtp_accepted"] / max(totals["mtp_predicted"], 1)
    if totals["bytes"]:
        metrics["eval_bits_per_byte"] = totals["nats"] / math.log(2) / totals["bytes"]
    return metrics
