"""Distillation on texts that the student writes (on-policy distillation)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from trainer.objectives.base import Batch, Evaluation, Field
from trainer.objectives.distillation import Distillation
from trainer.objectives.next_token import NextToken
from trainer.ops.losses import cross_entropy

OLD, LABELLED = "old_log_probs", "labelled"


@dataclass(frozen=True, kw_only=True)
class OnPolicy(Distillation):
    """`Distillation` on completions of the student (Agarwal et al. 2024, arXiv:2306.13649). See `Objective`.

    Only the completions' tokens contribute to the loss. The batch field `LABELLED` has one value for all completions of
    a batch: 1 if they come from the data. Otherwise the value is 0, which makes label_loss 0.

    With `sampled`, the divergence D of `Distillation` is estimated from the sampled token y alone, as -r A. Here r =
    p_student(y) / p_old(y), where p_old is the distribution from which y was sampled, and the advantage A = log
    p_teacher(y) - log p_student(y) has no gradient (Lu et al. 2025, thinkingmachines.ai/blog/on-policy-distillation).
    The expectation of this estimate is KL(student || teacher) over the tokens that both vocabularies share, and the
    expectation of its gradient is the gradient of this KL divergence. For a token that the teacher lacks, D is 0.

    Evaluation measures D itself, not its estimate, on greedily decoded completions; the mean of D is also the
    evaluation loss.
    """

    sampled: bool

    reads: ClassVar[tuple[str, ...]] = NextToken.reads
    fields: ClassVar[dict[str, Field]] = {**NextToken.fields, **dict.fromkeys((OLD, LABELLED), Field(dtype="float32"))}
    compared: ClassVar[tuple[str, ...]] = ("targets", OLD)

    def of_hidden(
        self, params: Any, rest: Any, hidden_bte: jax.Array, batch: Batch, **others: Any
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        minimized, measured = super().of_hidden(params, rest, hidden_bte, batch, **others)
        return minimized | {"label_loss": jnp.max(batch[LABELLED]) * minimized["label_loss"]}, measured

    def evaluation(self, params: Any, rest: Any, batch: Batch, **others: Any) -> Evaluation:
        found = super(OnPolicy, replace(self, sampled=False)).evaluation(params, rest, batch, **others)
        assert found.others is not None
        return Evaluation(found.tokens, found.others["divergence"], None, found.others)

    def _of_logits(self, student: jax.Array, teacher: jax.Array, tokens: Batch) -> jax.Array:
        if not self.sampled:
            return super()._of_logits(student, teacher, tokens)
        shared_bt = jnp.minimum(tokens["targets"], self.teacher.tokens - 1)
        ours, theirs = (-cross_entropy(logits, shared_bt)[0] for logits in (student, teacher))
        return -jnp.exp(ours - tokens[OLD]) * jax.lax.stop_gradient(theirs - ours)

    def _known(self, batch: Batch) -> jax.Array:
        known = super()._known(batch)
        return known & (batch["targets"] < self.teacher.tokens) if self.sampled else known
