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

AHEAD = "mtp_inputs", "mtp_inputs_segmentation"  # the batch fields that form a `models.mtp.Ahead`
Apply = Callable[..., tuple[Any, Sown, Any]]  # the type of `backends.Model.apply`


def ahead_of(batch: Batch) -> Ahead | None:
    """Returns the fields of `batch` that multi-token prediction modules read; None if `batch` lacks these fields."""
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
    """Returns the hidden states [b, t, e] of the inputs of `batch`, and the sown values of the types in `capture`.

    With `MtpHidden` in `capture`, the multi-token prediction modules run. `key` is for dropout. `sampled`: whether
    update rules read sown values in this step (`products.Context`).
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
    compared: Any = None  # the result of `Comparison.compare`


class Comparison(NamedTuple):
    """A function that compares the trained model's logits with the logits of another model, which receives no
    gradients. The other model is optional.

    Attributes:
      compare: maps the trained model's logits [b, t, v], the other model's logits [b, t, w] and `tokens` to a pytree of
        arrays [b, t]. The second argument is None if there is no other model.
      tokens: a pytree of arrays [b, t, ...] that `compare` reads.
      apply, params, rest: the other model; `apply` is None if there is no other model.
      hidden_bte: the other model's hidden states.
      tiling: the tiling of the other model's head; None: no tiling.
    """

    compare: Callable[..., Any]
    tokens: Any
    apply: Apply | None = None
    params: Any = None
    rest: Any = None
    hidden_bte: jax.Array | None = None
    tiling: Tiling | None = None


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
    other: Comparison | None = None,
) -> TokenLogProbs:
    """Returns the head's `TokenLogProbs` for `target_bt`, from the hidden states.

    The head's logits have the model's dtype. They are divided by `temperature`, and the log-probabilities are computed
    from the quotients, in float32. With `tiling`, the logits of only one tile exist at a time. `mean`, `best`: whether
    to compute these fields. `other` computes the field `compared`, from logits that are not divided by `temperature`.
    """

    def values(params: Any, rest: Any, hidden_bte: jax.Array, tokens: Any, *models: Any) -> TokenLogProbs:
        target_bt, compared_bt, other_bte = tokens
        own = apply(params, rest, hidden_bte, method="head")[0]
        found = None
        if other is not None:
            theirs = other.apply and other.apply(*models[0], other_bte, method="head")[0]
            found = other.compare(own, theirs, compared_bt)
        logits = tempered(own, temperature)
        nll, log_z, *mean_nll = cross_entropy(logits, target_bt, mean)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32) if best else None
        return TokenLogProbs(-nll, log_z, -mean_nll[0] if mean else None, token, found)

    tokens: Any = (target_bt, None, None)
    models: list[tuple[Any, Any, Any]] = []
    if other is not None:
        tokens = target_bt, other.tokens, other.hidden_bte
        models = [(other.tiling, other.params, other.rest)] if other.apply else []
    if tiling is None:
        return values(params, rest, hidden_bte, tokens, *(model[1:] for model in models))
    return in_tiles(values, tiling, params, rest, hidden_bte, tokens, models)
