"""Next-token prediction."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from trainer.objectives.base import Batch, Evaluation, Field, Mean, Sums, Weights
from trainer.objectives.forward import Apply, TokenLogProbs, hidden_states, target_log_probs
from trainer.objectives.tiling import Tiling


@dataclass(frozen=True)
class NextToken:
    """The next-token loss, over the tokens whose target belongs to a segment. See `Objective`.

    Its terms are means over these tokens:
      lm_loss: the cross entropy, -log p(target).
      z_loss: `z_loss_multiplier` times log(Z)^2, where Z is the softmax normalizer (Chowdhery et al. 2022, PaLM,
        arXiv:2204.02311).
      label_smoothing_loss: `label_smoothing` times (log p(target) - the mean of log p over the vocabulary). The
        sum of this term and lm_loss is the cross entropy for the target distribution (1 - label_smoothing) x one-hot +
        label_smoothing x uniform (Szegedy et al. 2016, arXiv:1512.00567). lm_loss alone, which evaluation reports, has
        no smoothing.
    """

    apply: Apply
    z_loss_multiplier: float = 0.0
    label_smoothing: float = 0.0
    tiling: Tiling | None = None

    reads: ClassVar[tuple[str, ...]] = ("z_loss_multiplier", "label_smoothing")
    captures: ClassVar[tuple[type, ...]] = ()
    fields: ClassVar[dict[str, Field]] = {
        "inputs": Field(),
        "inputs_position": Field(),
        "inputs_segmentation": Field(),
        "targets": Field(),
        "targets_segmentation": Field(),
    }

    def weights(self, batch: Batch) -> Weights:
        tokens = jnp.sum(batch["targets_segmentation"] != 0, dtype=jnp.int32)
        return Weights(dict.fromkeys(("lm_loss", "z_loss", "label_smoothing_loss"), tokens), tokens)

    def token_terms(
        self, params: Any, rest: Any, hidden_bte: jax.Array, target_bt: jax.Array, **computed: Any
    ) -> tuple[dict[str, jax.Array], TokenLogProbs]:
        """Returns the terms of each token, float32 [b, t], and the log-probabilities from which they are computed. A
        term whose multiplier is 0 is omitted. `computed`: the arguments `best` and `other` of `target_log_probs`."""
        smoothed = self.label_smoothing != 0
        logs = target_log_probs(self.apply, params, rest, hidden_bte, target_bt, self.tiling, mean=smoothed, **computed)
        terms = {"lm_loss": -logs.target}
        if self.z_loss_multiplier:
            terms["z_loss"] = self.z_loss_multiplier * logs.log_z**2
        if logs.mean is not None:
            terms["label_smoothing_loss"] = self.label_smoothing * (logs.target - logs.mean)
        return terms, logs

    def sums(
        self,
        params: Any,
        rest: Any,
        batch: Batch,
        key: jax.Array | None,
        capture: Any = (),
        sampled: jax.Array | None = None,
        **others: Any,
    ) -> Sums:
        """See `Objective.sums`. `others` are passed to `of_hidden`."""
        hidden, sown = hidden_states(self.apply, params, rest, batch, key, capture, sampled)
        return Sums(*self.of_hidden(params, rest, hidden, batch, **others), sown)

    def of_hidden(
        self, params: Any, rest: Any, hidden_bte: jax.Array, batch: Batch, **others: Any
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns the sums of the minimized and of the measured terms, given the hidden states of the inputs. `others`:
        additional arguments for subclasses."""
        return self.terms(params, rest, hidden_bte, batch["targets"], batch["targets_segmentation"]), {}

    def terms(
        self, params: Any, rest: Any, hidden_bte: jax.Array, target_bt: jax.Array, segment_bt: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns the sum of each term over the tokens whose target has a segment other than 0."""
        terms, _ = self.token_terms(params, rest, hidden_bte, target_bt)
        bears_loss = segment_bt != 0
        return {name: jnp.sum(jnp.where(bears_loss, term, 0)) for name, term in terms.items()}

    def evaluation(self, params: Any, rest: Any, batch: Batch, **others: Any) -> Evaluation:
        """Returns the cross entropy, and any further terms that a subclass measures. See `Objective.evaluation`."""
        sums = self.sums(params, rest, batch, key=None, **others)
        terms, tokens = self.weights(batch)
        nats = Mean((sums.minimized | sums.measured)["lm_loss"], tokens)
        means = {name: Mean(total, terms[name]) for name, total in sums.measured.items() if name != "lm_loss"}
        return Evaluation(tokens, nats, nats, means or None)
