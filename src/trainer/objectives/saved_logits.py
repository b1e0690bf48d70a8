"""Distillation from a teacher's saved logits (`data.teacher_logits`), which are batch fields. No teacher runs.

Shapes: b rows, t tokens of a row, v tokens of the student's vocabulary, k saved tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from trainer.objectives.base import Batch, Evaluation, Field
from trainer.objectives.distillation import TEMPERATURE, Compared, Distillation
from trainer.objectives.forward import Comparison
from trainer.objectives.next_token import NextToken
from trainer.ops.divergence import first_tokens, with_others

# The batch fields: LOGITS [b, t, k]; TOKENS [b, t, k], the tokens of these logits; and OTHERS [b, t], one logit for all
# other tokens together, at the temperature of the run. If the logits of all tokens are saved, they are in vocabulary
# order, and LOGITS is the only field.
LOGITS, TOKENS, OTHERS = "teacher_logits", "teacher_tokens", "teacher_others"


def saved_fields(k: int, vocab_size: int, dtype: str) -> dict[str, Field]:
    """Returns the batch fields for k saved logits per position, stored in `dtype`. `vocab_size`: the size of the
    teacher's vocabulary."""
    saved = {LOGITS: Field(("rows", "length", k), dtype)}
    if k < vocab_size:
        ids = "uint16" if vocab_size <= 1 << 16 else "int32"
        saved |= {TOKENS: Field(("rows", "length", k), ids), OTHERS: Field(dtype="float32")}
    return saved


class SavedTeacher(NamedTuple):
    """A teacher of which only saved logits are known. `saved`: the batch fields that contain these logits. `tokens`,
    `vocab_size`: see `Teacher`."""

    tokens: int
    vocab_size: int
    saved: Mapping[str, Field]
    frozen: None = None


@dataclass(frozen=True, kw_only=True)
class SavedDistillation(Distillation):
    """`Distillation` from saved logits. If the logits of all tokens are saved, the terms equal `Distillation`'s.

    If fewer logits are saved, D compares distributions over k + 1 events (each of the k saved tokens, and any other
    token), and teacher_lm_loss is not measured. Evaluation reports only the next-token loss, because no logits are
    saved for evaluation data.
    """

    teacher: SavedTeacher  # type: ignore[assignment]

    reads: ClassVar[tuple[str, ...]] = NextToken.reads

    @property
    def fields(self) -> Mapping[str, Field]:  # type: ignore[override]
        return {**NextToken.fields, **self.teacher.saved}

    @property
    def compared(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*Distillation.compared, *self.teacher.saved)

    @property
    def unevaluated(self) -> Mapping[str, Field]:
        return self.teacher.saved

    def evaluation(self, params: Any, rest: Any, batch: Batch, **others: Any) -> Evaluation:
        return NextToken(self.apply, tiling=self.tiling).evaluation(params, rest, batch)

    def _comparison(self, frozen: Any, batch: Batch, temperature: Any) -> Comparison:
        return Comparison(self._compared, self._tokens(batch, temperature))

    def _compared(self, student: jax.Array, logits: Any, tokens: Batch) -> Compared:
        if OTHERS in tokens:
            return Compared(jax.checkpoint(self._of_likely)(student, tokens), None)
        return super()._compared(student, tokens[LOGITS], tokens)

    def _of_likely(self, student: jax.Array, tokens: Batch) -> jax.Array:
        temperature = tokens[TEMPERATURE][..., None]
        (tempered,) = first_tokens(self.teacher.tokens, student.astype(jnp.float32) / temperature)
        ours = with_others(tempered, tokens[TOKENS].astype(jnp.int32))
        likely = tokens[LOGITS].astype(jnp.float32) / temperature
        return self.divergence(ours, jnp.concatenate([likely, tokens[OTHERS][..., None]], axis=-1))
