"""Next-token prediction."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.layers.sown import Sown
from trainer.ops.losses import cross_entropy

Batch = Mapping[str, jax.Array]


class Objective(NamedTuple):
    """Cross entropy of the next token and, with `z_loss_multiplier`, the mean of log(Z)^2 (Chowdhery et al. 2022, PaLM,
    arXiv:2204.02311), both over the tokens whose target belongs to a segment."""

    apply: Callable[..., tuple[Any, Sown, Any]]  # a model's
    z_loss_multiplier: float = 0.0
    capture: tuple[type, ...] = ()

    @staticmethod
    def weight(batch: Batch) -> jax.Array:
        """The number of loss-bearing tokens in `batch`, int32."""
        return jnp.sum(batch["targets_segmentation"] != 0, dtype=jnp.int32)

    def sums(self, params: Any, rest: Any, batch: Batch, key: jax.Array | None) -> tuple[dict[str, jax.Array], Sown]:
        """Sums over the loss-bearing tokens of `batch`, float32 scalars in nats, one a term; and what was sown.

        The terms are lm_loss (cross entropy alone) and, if it has a multiplier, z_loss; the objective is their sum.
        """
        inputs = (batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], batch["row"])
        hidden, sown, _ = self.apply(params, rest, *inputs, capture=self.capture, key=key)
        logits, _, _ = self.apply(params, rest, hidden, method="head")
        nll, log_z = cross_entropy(logits, batch["targets"])
        bears_loss = batch["targets_segmentation"] != 0
        terms = {"lm_loss": nll}
        if self.z_loss_multiplier:
            terms["z_loss"] = self.z_loss_multiplier * log_z**2
        return {name: jnp.sum(jnp.where(bears_loss, term, 0)) for name, term in terms.items()}, sown
