"""The interface of an objective."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx

from trainer.layers.sown import Sown

Batch = Mapping[str, jax.Array]


class Field(NamedTuple):
    """An array of a batch: the size of each axis ("rows", "length" or a number), and the dtype."""

    shape: tuple[str | int, ...] = ("rows", "length")
    dtype: str = "int32"


# A field of every batch: the index of each row in the global batch. Dropout depends on it.
ROW = {"row": Field(("rows",))}


class Mean(NamedTuple):
    """A mean over a batch, as two scalars that add up over batches: 0 where `weight` is 0."""

    total: jax.Array
    weight: jax.Array


class Weights(NamedTuple):
    """The divisors of a batch, known before its terms are summed.

    Attributes:
      terms: the divisor of each sum by name, of the same shape.
      tokens: the number of loss-bearing tokens, int32 []: 0 exactly where the divisors are 0; such a batch
        makes no update.
    """

    terms: dict[str, jax.Array]
    tokens: jax.Array


class Evaluation(NamedTuple):
    """What evaluation reports of a batch.

    Attributes:
      tokens: as in `Weights`.
      loss: `eval_loss`, which also chooses the best checkpoints.
      cross_entropy: in nats per loss-bearing token, those of `targets` whose `targets_segmentation` is not 0: for
        perplexity and bits per byte. None if there is no such mean; a batch then need not have these fields.
      others: further means, each reported as eval_ and its name.
    """

    tokens: jax.Array
    loss: Mean
    cross_entropy: Mean | None = None
    others: Mapping[str, Mean] | None = None


class Sums(NamedTuple):
    """Sums over a batch or a microbatch, float32 by name, and sown values.

    A sum is a scalar, or an array [n] of n parts, each of which is divided by its own weight: the term is their sum.
    """

    minimized: dict[str, jax.Array]  # each is divided by its weight; the loss is the sum of the quotients
    measured: dict[str, jax.Array]  # also divided by their weights, but only reported
    sown: Sown


class Objective(Protocol):
    """A training objective. Every term is a sum over rows, divided by a weight that is known in advance, so that the
    loss does not depend on accumulation over microbatches.

    One name of a term has a meaning: `lm_loss` is the cross entropy of the next token in nats, with the number of
    loss-bearing tokens as its weight. Perplexity is reported where there is such a term; it is not required.
    """

    @property
    def fields(self) -> Mapping[str, Field]:
        """The arrays of a batch that it reads, by name. The first size of each is "rows". Every batch also has `ROW`,
        which need not be declared."""

    @property
    def captures(self) -> tuple[type[nnx.Variable], ...]:
        """The sown types that it captures for itself; the step does not return their values."""

    def weights(self, batch: Batch) -> Weights:
        """The divisors of the terms, computed from the whole batch."""

    def sums(
        self,
        params: Any,
        rest: Any,
        batch: Batch,
        key: jax.Array | None,
        capture: tuple[type[nnx.Variable], ...] = (),
        sampled: jax.Array | None = None,
    ) -> Sums:
        """The sums over `batch`, with the sown values of `capture`. `key` and `sampled` are for the model
        (`backends.Model.apply`)."""

    def evaluation(self, params: Any, rest: Any, batch: Batch) -> Evaluation:
        """What evaluation reports of `batch`, without dropout."""


def batch_fields(objective: Objective) -> dict[str, Field]:
    """All arrays of a batch of `objective`, by name."""
    return {**objective.fields, **ROW}
