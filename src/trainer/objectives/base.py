"""The interface of an objective."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx

from trainer.layers.sown import Sown

Batch = Mapping[str, jax.Array]


class Field(NamedTuple):
    """An array of a batch: its sizes, each "rows", "length" or a number, and its dtype."""

    shape: tuple[str | int, ...] = ("rows", "length")
    dtype: str = "int32"


class Sums(NamedTuple):
    """Sums over a batch or a microbatch, float32 by name, and sown values.

    A sum is a scalar, or an array [n] of n parts, each of which is divided by its own weight: the term is their sum.
    """

    minimized: dict[str, jax.Array]  # each is divided by its weight; the loss is the sum of the quotients
    measured: dict[str, jax.Array]  # also divided by their weights, but only reported
    sown: Sown


class Objective(Protocol):
    """A training objective. Every term is a sum over rows, divided by a weight that is known in advance, so that the
    loss does not depend on accumulation over microbatches."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The arrays of a batch that it reads, by name. The first size of each is "rows"."""

    @property
    def captures(self) -> tuple[type[nnx.Variable], ...]:
        """The sown types that it captures itself: it needs them, and no one else gets them."""

    def weights(self, batch: Batch) -> dict[str, jax.Array]:
        """The divisor of each sum by name, of the same shape, computed from the whole batch. That of `lm_loss` is the
        number of loss-bearing tokens, int32."""

    def sums(
        self,
        params: Any,
        rest: Any,
        batch: Batch,
        key: jax.Array | None,
        capture: tuple[type[nnx.Variable], ...] = (),
    ) -> Sums:
        """The sums over `batch`, with the sown values of `capture`. One is `lm_loss`, the cross entropy in nats."""

    def evaluation(self, params: Any, rest: Any, batch: Batch) -> dict[str, jax.Array]:
        """Sums over `batch` that evaluation reports, without dropout: `nats`, the cross entropy of the next token
        alone, and optional sums that `training.evaluate.summarize` reports."""
