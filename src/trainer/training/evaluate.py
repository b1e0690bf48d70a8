"""Loss on held-out rows."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.backends import StateCodec
from trainer.objectives import Objective
from trainer.observe import perplexity


def make_eval_step(codec: StateCodec, objective: Objective, during: Any) -> Callable[..., dict[str, jax.Array]]:
    """`eval_step(native_state, batch, bytes_per_token [vocab]) -> sums` over the loss-bearing tokens of `batch`: the
    cross entropy in nats, the number of tokens, and the bytes that their targets stand for. Without dropout.

    `during`: where the model computes with its parameters, see `step.Layout`."""

    def eval_step(state: Any, batch: Mapping[str, jax.Array], bytes_per_token: jax.Array) -> dict[str, jax.Array]:
        tree = codec.unpack(state)
        params = jax.lax.with_sharding_constraint(tree.params, during)
        sums, _ = objective.sums(params, tree.rest, batch, key=None)
        bears_loss = batch["targets_segmentation"] != 0
        return {
            "nats": sums["lm_loss"],
            "tokens": objective.weight(batch),
            "bytes": jnp.sum(jnp.where(bears_loss, bytes_per_token[batch["targets"]], 0)),
        }

    return eval_step


def summarize(sums: Iterable[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Metrics over all batches, weighted by token: eval_loss (nats per token), eval_perplexity, eval_tokens and, where
    the targets stand for bytes, eval_bits_per_byte (document ends cost bits and stand for no byte)."""
    totals = {"nats": 0.0, "tokens": 0.0, "bytes": 0.0}
    for batch in sums:
        for name in totals:
            totals[name] += float(batch[name])
    loss = totals["nats"] / max(totals["tokens"], 1)
    metrics = {
        "eval_loss": loss,
        "eval_perplexity": perplexity(loss),
        "eval_tokens": int(totals["tokens"]),
    }
    if totals["bytes"]:
        metrics["eval_bits_per_byte"] = totals["nats"] / math.log(2) / totals["bytes"]
    return metrics
