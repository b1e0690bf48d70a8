"""Next-token prediction."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from trainer.objectives.base import Batch, Field, Sums
from trainer.objectives.forward import Apply, hidden_states, target_log_probs


@dataclass(frozen=True)
class NextToken:
    """Cross entropy of the next token and, with `z_loss_multiplier`, the mean of log(Z)^2 (Chowdhery et al. 2022, PaLM,
    arXiv:2204.02311), both over the tokens whose target belongs to a segment. See `Objective`."""

    apply: Apply
    z_loss_multiplier: float = 0.0

    fields: ClassVar[dict[str, Field]] = {
        "inputs": Field(),
        "inputs_position": Field(),
        "inputs_segmentation": Field(),
        "targets": Field(),
        "targets_segmentation": Field(),
        "row": Field(("rows",)),
    }

    def weights(self, batch: Batch) -> dict[str, jax.Array]:
        """See `Objective.weights`."""
        tokens = jnp.sum(batch["targets_segmentation"] != 0, dtype=jnp.int32)
        return {"lm_loss": tokens, "z_loss": tokens}

    def sums(self, params: Any, rest: Any, batch: Batch, key: jax.Array | None, capture: Any = ()) -> Sums:
        """lm_loss, the cross entropy, and z_loss if `z_loss_multiplier` is not 0. See `Objective.sums`."""
        hidden, sown = hidden_states(self.apply, params, rest, batch, key, capture)
        log_prob, log_z = target_log_probs(self.apply, params, rest, hidden, batch["targets"])
        terms = {"lm_loss": -log_prob}
        if self.z_loss_multiplier:
            terms["z_loss"] = self.z_loss_multiplier * log_z**2
        bears_loss = batch["targets_segmentation"] != 0
        return Sums({name: jnp.sum(jnp.where(bears_loss, term, 0)) for name, term in terms.items()}, {}, sown)
