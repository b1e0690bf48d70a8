"""Focal loss (Lin et al. 2017, arXiv:1708.02002) as a custom objective, and a program that trains with it.

An example for docs/guides/extending.md. The program takes the arguments of trainer.train or, after the word
`parity`, those of trainer.parity:

    python docs/guides/own_objective.py base.yml dataset_type=synthetic steps=20
    python docs/guides/own_objective.py parity base.yml left=nnx right=linen
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trainer import parity
from trainer.config.errors import exit_on_user_error
from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.objectives.base import Sums, Weights
from trainer.objectives.forward import hidden_states, target_log_probs
from trainer.objectives.next_token import NextToken
from trainer.objectives.registry import make_tiling
from trainer.training.build import build
from trainer.training.loop import Reports, fit
from trainer.training.start import Start


@dataclass(frozen=True)
class Focal(NextToken):
    """The loss -(1 - p)^gamma log p, where p is the probability of the next token, so likely tokens count less.

    The metric `lm_loss` is the cross entropy, -log p.
    """

    gamma: float = 2.0

    def weights(self, batch):
        """Returns the divisor of each term: the number of tokens that contribute to the loss."""
        _, tokens = super().weights(batch)
        return Weights({"focal_loss": tokens, "lm_loss": tokens}, tokens)

    def sums(self, params, rest, batch, key, capture=(), sampled=None):
        """Returns the sums of both terms over `batch`; training minimizes `focal_loss`."""
        hidden, sown = hidden_states(self.apply, params, rest, batch, key, capture, sampled)
        log_p = target_log_probs(self.apply, params, rest, hidden, batch["targets"], self.tiling).target
        bears_loss = batch["targets_segmentation"] != 0

        def over_tokens(term):
            return jnp.sum(jnp.where(bears_loss, term, 0))

        focal = over_tokens(-((1 - jnp.exp(log_p)) ** self.gamma) * log_p)
        return Sums({"focal_loss": focal}, {"lm_loss": over_tokens(-log_p)}, sown)


def make_objective(config: Any, model: Any) -> Focal:
    """Returns the objective. This function is the argument `make_objective` of `build` and of `parity.main`."""
    return Focal(model.apply, tiling=make_tiling(config, model))


@exit_on_user_error
def main(words: Sequence[str]) -> None:
    """Trains with the command-line arguments `words`, without checkpoints, and prints each step and evaluation."""

    def show(row: Mapping[str, Any]) -> None:
        print(" ".join(f"{name}={row[name]:.5g}" for name in ("step", "loss", "lm_loss", "eval_loss") if name in row))

    run = build(load(words).config, jax.devices(), make_objective=make_objective)
    dataset = open_dataset(run.config, print)
    fit(run, run.compile_on_leaves(), Start(run.init()), dataset, Reports(show, show, sync=lambda: None))


if __name__ == "__main__":
    if sys.argv[1:2] == ["parity"]:
        parity.main(sys.argv[2:], make_objective=make_objective)
    else:
        main(sys.argv[1:])
