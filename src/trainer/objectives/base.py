"""The interface of an objective."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx

from trainer.config.keys import Config
from trainer.layers.sown import Sown

Batch = Mapping[str, jax.Array]


class Field(NamedTuple):
    """The declaration of an array of a batch: the size of each axis ("rows", "length" or a number), and the dtype."""

    shape: tuple[str | int, ...] = ("rows", "length")
    dtype: str = "int32"


# Every batch has this field: the index of each row in the global batch. Dropout depends on it.
ROW = {"row": Field(("rows",))}


class Mean(NamedTuple):
    """A mean over a batch, as two scalars that can be summed over batches. If the weight is 0, so is the total."""

    total: jax.Array
    weight: jax.Array


class Weights(NamedTuple):
    """The divisors of the sums over a batch. They are computed before the sums.

    Attributes:
      terms: the divisor of each sum, by the name of the sum and with the same shape.
      tokens: the number of tokens that contribute to the loss, int32 []. A batch with 0 such tokens makes no update. In
        any other batch, the divisors of the minimized sums must be positive.
    """

    terms: dict[str, jax.Array]
    tokens: jax.Array


class Evaluation(NamedTuple):
    """The values that evaluation reports for a batch.

    Attributes:
      tokens: as in `Weights`.
      loss: reported as eval_loss, which also selects the best checkpoints.
      cross_entropy: the cross entropy of the batch field `targets`, in nats per token whose `targets_segmentation` is
        not 0. Used for perplexity and bits per byte. None if the objective has no cross entropy; its batches need not
        have these two fields.
      others: additional means by name, reported as eval_NAME.
    """

    tokens: jax.Array
    loss: Mean
    cross_entropy: Mean | None = None
    others: Mapping[str, Mean] | None = None


class Sums(NamedTuple):
    """Sums over a batch or a microbatch, in float32 and by name, and sown values.

    Each sum determines one term: the sum divided by the weight of the same name in `Weights.terms`. If the sum and the
    weight are arrays of n parts, [n], instead of scalars, the term is the sum of the parts' quotients.
    """

    minimized: dict[str, jax.Array]  # the loss is the sum of the terms that these sums determine
    measured: dict[str, jax.Array]  # these sums determine terms that are reported, but not minimized
    sown: Sown


class Frozen(NamedTuple):
    """Arrays that an objective reads and no step changes, such as the parameters of a reference model.

    Attributes:
      abstract: a pytree with a ShapeDtypeStruct at each leaf.
      axes: the same tree with a `sharding.Axes` at each leaf.
      make: returns the arrays, given `abstract` with a sharding at each leaf. Since no checkpoint contains the arrays,
        `make` is called at the start of every process, and must return the same arrays in a resumed run. None: the
        arrays are loaded from `place` or, if `place` is empty, are the run's initial parameters (`first_parameters`).
      place: the configuration key for the folder with a teacher's weights (`weights.teacher_files`); "": the arrays are
        not a teacher's.
      on_host: whether the arrays are stored in host memory.
      flops: the FLOPs per token that the use of these arrays adds to a step.
    """

    abstract: Any
    axes: Any
    make: Callable[[Any], Any] | None
    place: str = ""
    on_host: bool = False
    flops: float = 0.0


class Objective(Protocol):
    """A training objective.

    Every term is a sum over rows, divided by a weight that is known in advance. The loss therefore does not depend on
    how a batch is split into microbatches.

    One term name is reserved: `lm_loss` is the cross entropy of the next token in nats, weighted by the number of
    tokens that contribute to the loss. The term is optional; if it exists, perplexity is reported.

    An objective that reads arrays in addition to the train state has an attribute `frozen` of type `Frozen`. Its
    methods `sums` and `evaluation` then receive these arrays as the keyword argument `frozen`.

    If the attribute `of_step` is true, `sums` receives the number of completed updates, int32 [], as the keyword
    argument `step`. Outside of training, `step` is None.

    An objective may read arrays that are derived from a batch and depend on the order of its tokens. The attribute
    `derived` declares these arrays in the format of `fields`, and the method `prepare(batch) -> batch` adds them.
    `prepare` runs on the host and receives the whole rows of this process, because on devices the tokens of a row may
    be reordered.

    If evaluation does not read all fields, the attribute `unevaluated` declares the unread ones in the format of
    `fields`. In evaluation batches, the unread arrays contain zeros.

    The keys `z_loss_multiplier`, `label_smoothing` and `mtp_num_layers` add terms to the next-token loss. The attribute
    `reads` lists the keys among these that the objective supports; the others are refused if they are set (`unread`).
    The objective's class must define `reads` itself: an inherited `reads` is ignored.

    An objective may report maxima over the tokens of a batch: the attribute `maxima` lists their names, and `sums`
    returns their values as sown values of type `layers.sown.Maximum`.
    """

    @property
    def fields(self) -> Mapping[str, Field]:
        """The arrays of a batch that the objective reads, by name. The first axis of each is "rows". Every batch also
        has `ROW`, which need not be declared."""

    @property
    def captures(self) -> tuple[type[nnx.Variable], ...]:
        """The types of sown values that only the objective reads; the step does not return their values."""

    def weights(self, batch: Batch) -> Weights:
        """Returns the divisors of the terms, computed from the whole batch."""

    def sums(
        self,
        params: Any,
        rest: Any,
        batch: Batch,
        key: jax.Array | None,
        capture: tuple[type[nnx.Variable], ...] = (),
        sampled: jax.Array | None = None,
    ) -> Sums:
        """Returns the sums over `batch`, and the sown values of the types in `capture`. `key` and `sampled` are passed
        to `backends.Model.apply`."""

    def evaluation(self, params: Any, rest: Any, batch: Batch) -> Evaluation:
        """Returns the values that evaluation reports for `batch`, without dropout."""


def frozen_of(objective: Objective) -> Frozen | None:
    """Returns the declaration of the arrays that `objective` reads in addition to the train state, or None."""
    return getattr(objective, "frozen", None)


def maxima_of(objective: Objective) -> tuple[str, ...]:
    """Returns the names of the maxima that `objective` reports."""
    return getattr(objective, "maxima", ())


_TERMS = ("z_loss_multiplier", "label_smoothing", "mtp_num_layers")


def reads_of(objective: Objective) -> Collection[str]:
    """Returns the keys in `_TERMS` that the objective reads. A subclass does not inherit `reads`, because its loss may
    differ."""
    return objective.reads if "reads" in vars(type(objective)) else ()  # type: ignore[attr-defined]


def unread(objective: Objective, config: Config) -> list[str]:
    """Returns a message for each loss term that `config` requests but `objective` does not compute."""
    return [
        f"{key}={config[key]}: the objective {type(objective).__name__} does not read it; remove the key, or list "
        "it in the objective's attribute reads"
        for key in _TERMS
        if config[key] and key not in reads_of(objective)
    ]


def derived_of(objective: Objective) -> Mapping[str, Field]:
    """Returns the declarations of the arrays that `prepared` adds to a batch of `objective`."""
    return getattr(objective, "derived", {})


def unevaluated_of(objective: Objective) -> Mapping[str, Field]:
    """Returns the declarations of the fields of `objective` that evaluation does not read."""
    return getattr(objective, "unevaluated", {})


def prepared(objective: Objective, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a batch on the host with the arrays that `objective` derives from it."""
    return objective.prepare(batch) if hasattr(objective, "prepare") else batch


def of_step(objective: Objective) -> bool:
    """Returns whether the terms of `objective` depend on the number of completed updates."""
    return getattr(objective, "of_step", False)


def frozen_argument(objective: Objective, frozen: Any) -> dict[str, Any]:
    """Returns the keyword argument `frozen` for the methods of `objective`; {} if it declares no `frozen`."""
    return {} if frozen_of(objective) is None else {"frozen": frozen}


def batch_fields(objective: Objective) -> dict[str, Field]:
    """Returns the declarations of all arrays that a data source produces in a batch for `objective`, by name."""
    return {**objective.fields, **ROW}


def placed_fields(objective: Objective) -> dict[str, Field]:
    """Returns the declarations of all arrays of a batch on devices, by name, including those that `prepared` adds."""
    return {**batch_fields(objective), **derived_of(objective)}
