"""Shared by objectives: hidden states of a batch, and log-probabilities from the head."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from trainer.layers.sown import Sown
from trainer.objectives.base import Batch
from trainer.ops.losses import cross_entropy

Apply = Callable[..., tuple[Any, Sown, Any]]  # a model's


def hidden_states(
    apply: Apply, params: Any, rest: Any, batch: Batch, key: jax.Array | None, capture: tuple[type[nnx.Variable], ...]
) -> tuple[jax.Array, Sown]:
    """Hidden states [b, t, e] of the inputs of `batch`, and the sown values of `capture`; `key` is for dropout."""
    inputs = (batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], batch["row"])
    hidden, sown, _ = apply(params, rest, *inputs, capture=capture, key=key)
    return hidden, sown


def target_log_probs(
    apply: Apply, params: Any, rest: Any, hidden_bte: jax.Array, target_bt: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The log-probability of each target in nats, and the log of the softmax's normalizer Z: float32 [b, t]."""
    logits, _, _ = apply(params, rest, hidden_bte, method="head")
    nll, log_z = cross_entropy(logits, target_bt)
    return -nll, log_z
