"""Functions that objectives share: hidden states of a batch, and log-probabilities from the output head."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.layers.sown import MtpHidden, Sown
from trainer.models.mtp import Ahead
from trainer.objectives.base import Batch
from trainer.objectives.tiling import Tiling, in_tiles
from trainer.ops.losses import cross_entropy, tempered

AHEAD = "mtp_inputs", "mtp_inputs_segmentation"  # batch fields that make a `models.mtp.Ahead`
Apply = Callable[..., tuple[Any, Sown, Any]]  # `backends.Model.apply`


def ahead_of(batch: Batch) -> Ahead | None:
    """Returns the fields of `batch` that modules of multi-token prediction read; None if the batch lacks them."""
    return Ahead(*(batch[name] for name in AHEAD)) if AHEAD[0] in batch else None


def hidden_states(
    apply: Apply,
    params: Any,
    rest: Any,
    batch: Batch,
    key: jax.Array | None,
    capture: tuple[type[nnx.Variable], ...],
    sampled: jax.Array | None = None,
) -> tuple[jax.Array, Sown]:
    """Returns the hidden states [b, t, e] of the inputs of `batch`, and the sown values of `capture`.

    With `MtpHidden` in `capture`, the modules of multi-token prediction run. `key` is for dropout. `sampled`: whether
    rules read sown values in this step (`products.Context`).
    """
    inputs = (batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], batch["row"])
    ahead = ahead_of(batch) if MtpHidden in capture else None
    hidden, sown, _ = apply(params, rest, *inputs, capture=capture, key=key, sampled=sampled, ahead=ahead)
    return hidden, sown


class TokenLogProbs(NamedTuple):
    """Statistics of the head's distribution for each token: float32 [b, t], log-probabilities in nats."""

    target: jax.Array  # log-probability of the target
    log_z: jax.Array  # log of the softmax normalizer
    mean: jax.Array | None = None  # the mean log-probability over the vocabulary
    best: jax.Array | None = None  # the most likely token, int32; without a gradient


def target_log_probs(
    apply: Apply,
    params: Any,
    rest: Any,
    hidden_bte: jax.Array,
    target_bt: jax.Array,
    tiling: Tiling | None = None,
    *,
    mean: bool = False,
    best: bool = False,
    temperature: float = 1.0,
) -> TokenLogProbs:
    """Returns the head's `TokenLogProbs` for `target_bt`, from the hidden states.

    They are computed in float32 from logits in the model's dtype, divided by `temperature`. With `tiling`, the logits
    of only one tile exist at a time. `mean`, `best`: also compute these fields.
    """

    def values(params: Any, rest: Any, hidden_bte: jax.Array, target_bt: jax.Array) -> TokenLogProbs:
        logits = tempered(apply(params, rest, hidden_bte, method="head")[0], temperature)
        nll, log_z, *mean_nll = cross_entropy(logits, target_bt, mean)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32) if best else None
        return TokenLogProbs(-nll, log_z, -mean_nll[0] if mean else None, token)

    if tiling is None:
        return values(params, rest, hidden_bte, target_bt)
    return in_tiles(values, tiling, params, rest, hidden_bte, target_bt)
