"""Preference optimization: makes the chosen of two answers more likely than the rejected one.

Segments 2k - 1 and 2k of a row are pair k: the chosen and the rejected sequence. Each sequence is a prompt and an
answer. The field `targets_segmentation` is 0 except at the tokens of answers. Shapes: b rows, t tokens of a row, p the
maximum number of pairs in a row.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from trainer.objectives.base import Batch, Evaluation, Field, Frozen, Mean, Sums, Weights
from trainer.objectives.forward import Apply, hidden_states, target_log_probs
from trainer.objectives.next_token import NextToken
from trainer.objectives.reference import is_reference, reference_parameters
from trainer.objectives.segments import segment_sums
from trainer.objectives.tiling import Tiling

ANSWERS = "targets_segmentation"
_CERTAIN = -1e-7  # the greatest mean log-probability whose odds are finite in float32
_MEASURED = ("chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy", "chosen_nll")


class OfPairs(NamedTuple):
    """Values for the chosen and for the rejected sequence of each pair, each an array [b, p]."""

    chosen: jax.Array
    rejected: jax.Array


class Terms(NamedTuple):
    """The minimized terms of each pair, [b, p] by name, and the rewards of the pair's two answers."""

    minimized: Mapping[str, jax.Array]
    rewards: OfPairs


@dataclass(frozen=True)
class Preference(abc.ABC):
    """The common part of DPO and ORPO. The terms are means over pairs. See `Objective`.

    In addition to the minimized terms, these are measured:
      chosen_reward, rejected_reward: see the subclasses;
      reward_margin: chosen_reward - rejected_reward;
      reward_accuracy: the share of pairs whose chosen answer has the greater reward;
      chosen_nll: minus the mean log-probability of the tokens of the chosen answer.

    Attributes:
      smoothing: the assumed probability that the labels of a pair are swapped.
      frozen: the parameters of the reference model (see `Objective`); None without a reference model.
    """

    apply: Apply
    smoothing: float = 0.0
    tiling: Tiling | None = None
    frozen: Frozen | None = None

    captures: ClassVar[tuple[type, ...]] = ()
    fields: ClassVar[Mapping[str, Field]] = NextToken.fields
    minimized: ClassVar[tuple[str, ...]]  # the names of the terms that are minimized

    @abc.abstractmethod
    def terms(self, batch: Batch, policy_bt: jax.Array, reference_bt: jax.Array | None) -> Terms:
        """Returns the terms, given the log-probability of every target under the policy and the reference model."""

    def weights(self, batch: Batch) -> Weights:
        """See `Objective.weights`. `tokens` counts the tokens of both answers of a pair, and only for pairs in
        which both answers have tokens."""
        counts = of_pairs(None, batch)
        is_pair = _is_pair(counts)
        pairs = jnp.sum(is_pair, dtype=jnp.int32)
        tokens = jnp.sum(jnp.where(is_pair, counts.chosen + counts.rejected, 0), dtype=jnp.int32)
        return Weights(dict.fromkeys((*self.minimized, *_MEASURED), pairs), tokens)

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
        """See `Objective.sums`. The reference model has no dropout.

        Without dropout, if policy and reference model have equal parameters, the policy's log-probabilities are used
        for both. Otherwise, reward_accuracy would be arbitrary instead of 0, because two compiled forward passes can
        round differently.
        """
        policy_bt, sown = self._logs(params, rest, batch, key, capture, sampled)
        reference_bt = None
        if self.frozen is not None:
            reference_bt, _ = self._logs(reference_parameters(params, frozen), rest, batch)
            if key is None:
                reference_bt = jnp.where(is_reference(params, frozen), jax.lax.stop_gradient(policy_bt), reference_bt)
        minimized, rewards = self.terms(batch, policy_bt, reference_bt)
        counts = of_pairs(None, batch)
        measured = (
            *(*rewards, rewards.chosen - rewards.rejected, rewards.chosen > rewards.rejected),
            -_mean(of_pairs(policy_bt, batch), counts).chosen,
        )
        is_pair = _is_pair(counts)

        def sums(terms: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            return {name: jnp.sum(jnp.where(is_pair, term, 0), dtype=jnp.float32) for name, term in terms.items()}

        return Sums(sums(minimized), sums(dict(zip(_MEASURED, jax.lax.stop_gradient(measured), strict=True))), sown)

    def evaluation(self, params: Any, rest: Any, batch: Batch, **frozen: Any) -> Evaluation:
        """Returns the loss and the measured terms. See `Objective.evaluation`."""
        minimized, measured, _ = self.sums(params, rest, batch, None, **frozen)
        terms, tokens = self.weights(batch)
        loss = Mean(sum(minimized.values(), start=jnp.zeros(())), terms[self.minimized[0]])
        return Evaluation(tokens, loss, None, {name: Mean(total, terms[name]) for name, total in measured.items()})

    def _logs(
        self, params: Any, rest: Any, batch: Batch, key: Any = None, capture: Any = (), sampled: Any = None
    ) -> tuple[jax.Array, Any]:
        hidden, sown = hidden_states(self.apply, params, rest, batch, key, capture, sampled)
        return target_log_probs(self.apply, params, rest, hidden, batch["targets"], self.tiling).target, sown

    def _smoothed(self, logits: jax.Array) -> jax.Array:
        """Returns the cross entropy with label smoothing, given the logits of the event that the labels are correct."""
        return -(1 - self.smoothing) * jax.nn.log_sigmoid(logits) - self.smoothing * jax.nn.log_sigmoid(-logits)


@dataclass(frozen=True)
class Dpo(Preference):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290).

    The reward of an answer is `beta` times the log-ratio of its probabilities under the policy and the reference model.
      dpo_loss: -(1 - s) log sigmoid(m) - s log sigmoid(-m), where m is the margin of the rewards and s is `smoothing`.
    """

    beta: float = 0.1

    minimized = ("dpo_loss",)

    def terms(self, batch: Batch, policy_bt: jax.Array, reference_bt: jax.Array | None) -> Terms:
        assert reference_bt is not None
        rewards = OfPairs(*(self.beta * ratio for ratio in of_pairs(policy_bt - reference_bt, batch)))
        return Terms({"dpo_loss": self._smoothed(rewards.chosen - rewards.rejected)}, rewards)


@dataclass(frozen=True)
class Orpo(Preference):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691), without a reference model.

    The odds of an answer are p / (1 - p), where log p is the mean log-probability of its tokens. The reward of an
    answer is `weight` times log p.
      sft_loss: minus the mean log-probability of the tokens of the chosen answer, or, without `answer_only`, of the
        prompt and the chosen answer.
      odds_ratio_loss: `weight` times (-(1 - s) log sigmoid(r) - s log sigmoid(-r)), where r is the log of
        the ratio of the chosen answer's odds to the rejected answer's odds, and s is `smoothing`.
    """

    weight: float = 0.1
    answer_only: bool = True

    minimized = ("sft_loss", "odds_ratio_loss")

    def terms(self, batch: Batch, policy_bt: jax.Array, reference_bt: jax.Array | None) -> Terms:
        which = ANSWERS if self.answer_only else "inputs_segmentation"
        learnt = _mean(of_pairs(policy_bt, batch, which), of_pairs(None, batch, which))
        mean = _mean(of_pairs(policy_bt, batch), of_pairs(None, batch))
        chosen, rejected = (_log_odds(jnp.minimum(log_p, _CERTAIN)) for log_p in mean)
        odds_ratio_loss = self.weight * self._smoothed(chosen - rejected)
        rewards = OfPairs(*(self.weight * log_p for log_p in mean))
        return Terms({"sft_loss": -learnt.chosen, "odds_ratio_loss": odds_ratio_loss}, rewards)


def of_pairs(values_bt: jax.Array | None, batch: Batch, which: str = ANSWERS) -> OfPairs:
    """Returns, for each sequence, the sum of `values_bt` over those of its tokens that the batch field `which` assigns
    to a segment. By default these are the answer's tokens; with "inputs_segmentation", they are all tokens of the
    sequence. If `values_bt` is None, returns the number of these tokens."""
    segment_bt = batch[which]
    sums_bs = segment_sums(jnp.ones_like(segment_bt) if values_bt is None else values_bt, segment_bt)
    end = 1 + segment_bt.shape[-1] // 2 * 2
    return OfPairs(sums_bs[:, 1:end:2], sums_bs[:, 2 : end + 1 : 2])


def _is_pair(counts: OfPairs) -> jax.Array:
    """Returns whether both answers of a pair have tokens, bool [b, p]. `counts`: each answer's number of tokens."""
    return (counts.chosen > 0) & (counts.rejected > 0)


def _mean(sums: OfPairs, counts: OfPairs) -> OfPairs:
    return OfPairs(*(total / jnp.maximum(count, 1) for total, count in zip(sums, counts, strict=True)))


def _log_odds(log_p: jax.Array) -> jax.Array:
    """Returns log(p / (1 - p)). log(1 - p) is computed in one form for p > 1/2 and in another for smaller p, because
    each form loses precision in the other range."""
    others = jnp.where(log_p > -jnp.log(2.0), jnp.log(-jnp.expm1(log_p)), jnp.log1p(-jnp.exp(log_p)))
    return log_p - others
