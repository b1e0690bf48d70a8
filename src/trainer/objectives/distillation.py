"""Distillation: the student learns the teacher's distribution over the next token, in addition to the labels.

Shapes: b rows, t tokens of a row, v tokens of a vocabulary, e the width of hidden states.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config.keys import Config
from trainer.objectives.base import Batch, Field, Frozen, Weights
from trainer.objectives.forward import Apply, Comparison, hidden_states
from trainer.objectives.next_token import NextToken
from trainer.objectives.tiling import Tiling
from trainer.ops.divergence import Divergence, first_tokens
from trainer.ops.losses import cross_entropy

PARAMS, REST = "params", "rest"  # the two parts of the teacher's arrays
TEMPERATURE = "temperature"
# A derived field (see `Objective`): 1 if the teacher's vocabulary has this token and all earlier ones of its segment.
KNOWN = "teacher_knows"


class Schedule(NamedTuple):
    """A value that changes from `start` to `end` within `steps` updates. `shape`: constant, linear or cosine."""

    start: float
    end: float
    shape: str
    steps: int

    def __call__(self, step: jax.Array | None) -> Any:
        """Returns the value after `step` updates, float32 []; `start` if `step` is None or the value is constant."""
        if step is None or self.shape == "constant":
            return self.start
        progress = jnp.clip(step.astype(jnp.float32) / self.steps, 0, 1)
        if self.shape == "cosine":
            progress = (1 - jnp.cos(jnp.pi * progress)) / 2
        return self.start + (self.end - self.start) * progress


class Teacher(NamedTuple):
    """The model from which the student learns.

    Attributes:
      config: the teacher's resolved configuration.
      apply: `backends.Model.apply`.
      frozen: the teacher's arrays, {PARAMS: ..., REST: ...}.
      tokens: the number of tokens that the vocabularies share; these are the first tokens of both. Divergences are
        computed over these tokens.
      tiling: the tiling of the teacher's head; None: no tiling.
    """

    config: Config
    apply: Apply
    frozen: Frozen
    tokens: int
    tiling: Tiling | None

    @property
    def vocab_size(self) -> int:
        """The size of the teacher's vocabulary."""
        return int(self.config.vocab_size)


class Compared(NamedTuple):
    """Values of each token, float32 [b, t]. `teacher_nll`: the teacher's -log p(target) at temperature 1; None if the
    normalizer of the teacher's softmax is unknown."""

    divergence: jax.Array
    teacher_nll: jax.Array | None


@dataclass(frozen=True, kw_only=True)
class Distillation(NextToken):
    """A divergence from the teacher, mixed with the next-token loss. See `Objective`.

    Let a be the mixing weight (`alpha`) and T the temperature. The minimized terms are means over the tokens that
    contribute to the loss:
      distill_loss: a T^2 D, where D is the divergence between the distributions softmax(logits / T) of the two models.
        The factor T^2 compensates for the gradient of D with respect to the logits, which is proportional to 1 / T^2 at
        high temperatures (Hinton et al. 2015, arXiv:1503.02531).
      label_loss, label_smoothing_loss: (1 - a) times lm_loss and label_smoothing_loss of `NextToken`.
      z_loss: as in `NextToken`.
    The measured terms are lm_loss, divergence (D), and teacher_lm_loss, the teacher's cross entropy at temperature 1.

    The teacher has no dropout. If the student has tokens that the teacher lacks, D is 0 from the first such token of a
    segment to the segment's end, because the teacher cannot read the text from this token on. Multi-token prediction
    modules learn from the labels alone.
    """

    teacher: Teacher
    divergence: Divergence
    alpha: Schedule
    temperature: Schedule
    vocab_size: int  # the size of the student's vocabulary

    compared: ClassVar[tuple[str, ...]] = ("targets",)  # the batch fields that `_compared` reads

    @property
    def frozen(self) -> Frozen:
        return self.teacher.frozen

    @property
    def of_step(self) -> bool:
        return any(schedule.shape != "constant" for schedule in (self.alpha, self.temperature))

    @property
    def derived(self) -> Mapping[str, Field]:
        return {KNOWN: Field()} if self.vocab_size > self.teacher.tokens else {}

    def prepare(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self.derived:
            return batch
        tokens, segments = (np.asarray(batch[name]) for name in ("inputs", "inputs_segmentation"))
        return {**batch, KNOWN: known_so_far(tokens < self.teacher.tokens, segments).astype(np.int32)}

    def weights(self, batch: Batch) -> Weights:
        terms, tokens = super().weights(batch)
        counts = dict.fromkeys(("distill_loss", "label_loss", "divergence"), tokens)
        return Weights(terms | counts | {"teacher_lm_loss": jnp.sum(self._in_both(batch), dtype=jnp.int32)}, tokens)

    def of_hidden(
        self, params: Any, rest: Any, hidden_bte: jax.Array, batch: Batch, **others: Any
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        frozen, step = others.get("frozen"), others.get("step")
        alpha, temperature = self.alpha(step), self.temperature(step)
        terms, logs = self.token_terms(
            params, rest, hidden_bte, batch["targets"], other=self._comparison(frozen, batch, temperature)
        )
        bears_loss, compared = self._bears_loss(batch), logs.compared
        known = self._known(batch)
        sums = {name: jnp.sum(jnp.where(bears_loss, term, 0)) for name, term in terms.items()}
        divergence = jnp.sum(jnp.where(known, compared.divergence, 0))
        measured = {
            "lm_loss": sums.pop("lm_loss"),
            "divergence": divergence,
        }
        if compared.teacher_nll is not None:
            measured["teacher_lm_loss"] = jnp.sum(jnp.where(self._in_both(batch), compared.teacher_nll, 0))
        minimized = {
            "distill_loss": alpha * temperature**2 * divergence,
            "label_loss": (1 - alpha) * measured["lm_loss"],
            **sums,
        }
        if "label_smoothing_loss" in sums:
            minimized["label_smoothing_loss"] *= 1 - alpha
        return minimized, jax.lax.stop_gradient(measured)

    def teacher_hidden(self, frozen: Any, batch: Batch) -> jax.Array:
        """Returns the teacher's hidden states [b, t, e]."""
        readable = jnp.minimum(batch["inputs"], self.teacher.vocab_size - 1) if self.derived else batch["inputs"]
        weights = frozen[PARAMS], frozen[REST]
        return hidden_states(self.teacher.apply, *weights, {**batch, "inputs": readable}, None, ())[0]

    def _comparison(self, frozen: Any, batch: Batch, temperature: Any) -> Comparison:
        model = (
            self.teacher.apply,
            frozen[PARAMS],
            frozen[REST],
            self.teacher_hidden(frozen, batch),
            self.teacher.tiling,
        )
        return Comparison(self._compared, self._tokens(batch, temperature), *model)

    def _tokens(self, batch: Batch, temperature: Any) -> dict[str, jax.Array]:
        """Returns the arrays that `_compared` reads."""
        # The temperature is passed as an array [b, t], like values of tokens, because it may be a traced value, and the
        # backward pass of the tiles cannot close over traced values.
        temperature_bt = jnp.broadcast_to(jnp.float32(temperature), batch["targets"].shape)
        return {name: batch[name] for name in self.compared} | {TEMPERATURE: temperature_bt}

    def _compared(self, student: jax.Array, logits: jax.Array, tokens: Batch) -> Compared:
        # For the backward pass, jax.checkpoint saves only the inputs of `_divergence`.
        divergence = jax.checkpoint(self._divergence)(student, logits, tokens)
        return Compared(divergence, cross_entropy(logits, tokens["targets"])[0])

    def _divergence(self, student: jax.Array, teacher: jax.Array, tokens: Batch) -> jax.Array:
        """Returns the divergence at each token. `tokens`: the arrays from `_tokens`."""
        tempered = (logits.astype(jnp.float32) / tokens[TEMPERATURE][..., None] for logits in (student, teacher))
        student, teacher = first_tokens(self.teacher.tokens, *tempered)
        return self._of_logits(student, teacher, tokens)

    def _of_logits(self, student: jax.Array, teacher: jax.Array, tokens: Batch) -> jax.Array:
        del tokens
        return self.divergence(student, teacher)

    def _known(self, batch: Batch) -> jax.Array:
        """Returns whether each token contributes to the loss and has a divergence, bool [b, t]."""
        bears_loss = self._bears_loss(batch)
        return bears_loss & (batch[KNOWN] != 0) if self.derived else bears_loss

    def _in_both(self, batch: Batch) -> jax.Array:
        """Returns whether each target contributes to the loss, is in both vocabularies, and follows text that the
        teacher can read, bool [b, t]."""
        return Distillation._known(self, batch) & (batch["targets"] < self.teacher.tokens)

    def _bears_loss(self, batch: Batch) -> jax.Array:
        return batch["targets_segmentation"] != 0


def known_so_far(known: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Returns, for each token, whether `known` is true for it and all earlier tokens of its segment, bool [b, t].
    `segments`: the segment of each token; equal values are contiguous."""
    unknown = np.cumsum(~known, axis=1)
    begins = np.diff(segments, axis=1, prepend=-1) != 0
    before = np.where(begins, unknown - ~known, 0)
    return np.asarray(unknown == np.maximum.accumulate(before, axis=1))
