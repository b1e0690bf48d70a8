"""Group relative policy optimization: makes completions with a large advantage more likely."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from trainer.layers.sown import Maximum
from trainer.objectives.base import Batch, Evaluation, Field, Frozen, Mean, Sums, Weights
from trainer.objectives.forward import Apply, hidden_states, target_log_probs
from trainer.objectives.next_token import NextToken
from trainer.objectives.reference import reference_parameters
from trainer.objectives.segments import of_tokens, segment_sums
from trainer.objectives.tiling import Tiling

DRIFT = "rollout_log_prob_max_diff"
_FLOATS = Field(dtype="float32")


@dataclass(frozen=True)
class Policy:
    """The clipped policy-gradient loss, and the KL divergence of the policy from a reference model. See `Objective`.

    Each segment of a row is a sequence: a prompt and its completion. Only the completion's tokens contribute to the
    loss. Let r be a token's current probability divided by its probability when it was sampled, and A the advantage of
    the completion. The terms are
      policy_loss: -min(r A, clip(r, 1 - low, 1 + high) A) (Shao et al. 2024, arXiv:2402.03300);
      kl_loss: `beta` times (exp(d) - d - 1), where d is the reference's log-probability minus the policy's. This is a
        nonnegative estimate of the KL divergence from the reference (Schulman 2020, joschu.net/blog/kl-approx).
    As in the rollouts, probabilities are softmax(logits / `temperature`) over the whole vocabulary.

    Attributes:
      low, high: how far r may be below and above 1 before it is clipped.
      of_sequences: whether r is replaced by its geometric mean over the completion's tokens (Zheng et al. 2025,
        arXiv:2507.18071). Since these tokens share one advantage, GSPO-token and GSPO have equal losses and gradients.
      aggregation: see rl_loss_agg_mode in base.yml. Divisors are computed over the whole batch.
      frozen: the reference model's parameters (`first_parameters`); None if `beta` is 0.
    """

    apply: Apply
    low: float
    high: float
    beta: float
    of_sequences: bool
    aggregation: str
    temperature: float
    frozen: Frozen | None = None
    tiling: Tiling | None = None

    captures: ClassVar[tuple[type, ...]] = ()
    maxima: ClassVar[tuple[str, ...]] = (DRIFT,)
    # For each completion token: its log-probability when sampled, and the completion's advantage and reward.
    fields: ClassVar[Mapping[str, Field]] = {
        **NextToken.fields,
        **dict.fromkeys(("old_log_probs", "advantages", "rewards"), _FLOATS),
    }

    def weights(self, batch: Batch) -> Weights:
        tokens = jnp.sum(batch["targets_segmentation"] != 0, dtype=jnp.int32)
        sequences = jnp.sum(_lengths(batch) > 0, dtype=jnp.int32)
        divisor = tokens if self.aggregation == "token-mean" else sequences
        of_tokens = dict.fromkeys(("kl", "clip_fraction"), tokens)
        of_sequences = dict.fromkeys(("reward", "completion_tokens"), sequences)
        return Weights({"policy_loss": divisor, "kl_loss": divisor} | of_tokens | of_sequences, tokens)

    def sums(
        self,
        params: Any,
        rest: Any,
        batch: Batch,
        key: jax.Array | None,
        capture: Any = (),
        sampled: jax.Array | None = None,
        *,
        frozen: Any = None,
    ) -> Sums:
        """See `Objective.sums`. Sows the largest absolute change of a token's log-probability since sampling."""
        drawn = batch["targets_segmentation"] != 0
        log_probs, sown = self._log_probs(params, rest, batch, key, capture, sampled)
        change = jnp.where(drawn, log_probs - batch["old_log_probs"], 0)
        ratio, advantage = jnp.exp(self._log_ratio(change, batch)), batch["advantages"]
        gain, clipped = ratio * advantage, jnp.clip(ratio, 1 - self.low, 1 + self.high) * advantage
        minimized = {"policy_loss": self._total(-jnp.minimum(gain, clipped), batch)}
        measured = {"clip_fraction": jnp.sum(jnp.where(drawn, clipped < gain, False), dtype=jnp.float32)}
        if self.beta:
            reference, _ = self._log_probs(reference_parameters(params, frozen), rest, batch, key=None)
            difference = jnp.where(drawn, reference - log_probs, 0)
            kl = jnp.exp(difference) - difference - 1
            minimized["kl_loss"] = self.beta * self._total(kl, batch)
            measured["kl"] = jnp.sum(kl)
        measured |= self._of_rollouts(batch)
        if Maximum in capture:
            sown = {**sown, Maximum.__name__: {**sown[Maximum.__name__], DRIFT: jnp.max(jnp.abs(change))}}
        return Sums(minimized, measured, sown)

    def evaluation(self, params: Any, rest: Any, batch: Batch, *, frozen: Any = None) -> Evaluation:
        """See `Objective.evaluation`. Returns the mean reward of completions; the loss is the negative mean reward."""
        weights, sums = self.weights(batch), self._of_rollouts(batch)
        means = {name: Mean(total, weights.terms[name]) for name, total in sums.items()}
        total, weight = means["reward"]
        return Evaluation(weights.tokens, Mean(-total, weight), None, means)

    def _log_probs(
        self, params: Any, rest: Any, batch: Batch, key: Any, capture: Any = (), sampled: Any = None
    ) -> tuple[jax.Array, Any]:
        """Returns the log-probability of each target, float32 [b, t], and sown values."""
        hidden, sown = hidden_states(self.apply, params, rest, batch, key, capture, sampled)
        logs = target_log_probs(
            self.apply, params, rest, hidden, batch["targets"], self.tiling, temperature=self.temperature
        )
        return logs.target, sown

    def _log_ratio(self, change: jax.Array, batch: Batch) -> jax.Array:
        if not self.of_sequences:
            return change
        segment, count = batch["inputs_segmentation"], jnp.maximum(_lengths(batch), 1)
        return of_tokens(segment_sums(change, segment) / count, segment)

    def _total(self, values: jax.Array, batch: Batch) -> jax.Array:
        """Returns the sum of `values` [b, t]. The caller divides it by the weight that `aggregation` determines."""
        values = jnp.where(batch["targets_segmentation"] != 0, values, 0)
        if self.aggregation == "sequence-mean-token-mean":
            values /= of_tokens(jnp.maximum(_lengths(batch), 1), batch["inputs_segmentation"])
        return jnp.sum(values)

    def _of_rollouts(self, batch: Batch) -> dict[str, jax.Array]:
        lengths = _lengths(batch)
        rewards = segment_sums(batch["rewards"], batch["inputs_segmentation"]) / jnp.maximum(lengths, 1)
        return {"reward": jnp.sum(jnp.where(lengths > 0, rewards, 0)), "completion_tokens": jnp.sum(lengths)}


def _lengths(batch: Batch) -> jax.Array:
    """Returns the number of tokens of each segment's completion, float32 [b, t + 1] (see `objectives.segments`)."""
    segment = batch["inputs_segmentation"]
    drawn = (batch["targets_segmentation"] != 0).astype(jnp.float32)
    return segment_sums(drawn, segment).at[:, 0].set(0)
