"""Multi-token prediction: the loss of the next token and of the tokens after it (DeepSeek-V3, arXiv:2412.19437,
section 2.2).

At token t, module k predicts token t + k + 1 from the module's hidden states (`models.mtp`) with the model's head.
"""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.layers.sown import MtpHidden, Sown
from trainer.models.mtp import hidden_path
from trainer.objectives.base import Batch, Evaluation, Field, Mean, Sums, Weights, derived_of, prepared, reads_of
from trainer.objectives.forward import AHEAD, hidden_states
from trainer.objectives.next_token import NextToken
from trainer.ops.ahead import shift_left, still_inside

TARGETS, SEGMENTS = "mtp_targets", "mtp_targets_segmentation"


@dataclass(frozen=True)
class MultiToken:
    """The terms of the objective `next_token` and, for each of them, a term of the multi-token prediction modules:
    mtp_loss, mtp_z_loss, ... See `Objective`.

    To compute such a module term, each of the `modules` modules averages the term over the tokens that the module
    predicts. The module term is `scale` times the mean of these averages. Its sums and its weight are arrays [modules].

    Attributes:
      evaluated: the number (1, 2, ...) of the module whose acceptance rate evaluation reports; 0: no module.
    """

    next_token: NextToken
    modules: int
    scale: float
    evaluated: int = 0

    @property
    def reads(self) -> Collection[str]:
        return (*reads_of(self.next_token), "mtp_num_layers")

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.next_token.fields

    def __getattr__(self, name: str) -> Any:
        """Returns an optional attribute of `Objective` from `next_token`."""
        if name.startswith("__"):  # while an object is copied, it does not have `next_token` yet
            raise AttributeError(name)
        return getattr(self.next_token, name)

    @property
    def derived(self) -> Mapping[str, Field]:
        """See `Objective`. Four arrays [b, t, modules]. For token t and module k, they contain: token t + k; the
        segment of token t, or 0 if this segment does not contain the next k tokens; module k's target; and the target's
        segment, or 0 if there is no target."""
        of_modules = dict.fromkeys((*AHEAD, TARGETS, SEGMENTS), Field(("rows", "length", self.modules)))
        return {**derived_of(self.next_token), **of_modules}

    def prepare(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        inside = np.asarray(batch["inputs_segmentation"])
        token, target, segment = (np.asarray(batch[name]) for name in ("inputs", "targets", "targets_segmentation"))
        found = []
        for _ in range(self.modules):
            inside, token, target, segment = still_inside(inside), *map(shift_left, (token, target, segment))
            found.append((token, inside, target, np.where(inside != 0, segment, 0)))
        arrays = (np.stack(of_modules, axis=-1) for of_modules in zip(*found, strict=True))
        return {**prepared(self.next_token, batch), **dict(zip((*AHEAD, TARGETS, SEGMENTS), arrays, strict=True))}

    @property
    def captures(self) -> tuple[type, ...]:
        return (MtpHidden,)

    def weights(self, batch: Batch) -> Weights:
        """See `Objective.weights`. A module without targets gets weight 1; its sum is 0 anyway."""
        own, tokens = self.next_token.weights(batch)
        ahead = jnp.maximum(jnp.sum(batch[SEGMENTS] != 0, axis=(0, 1), dtype=jnp.int32), 1)
        return Weights(own | {_name(name): ahead for name in own}, tokens)

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
        types = tuple(dict.fromkeys((*capture, *self.captures)))
        hidden, sown = hidden_states(self.next_token.apply, params, rest, batch, key, types, sampled)
        minimized, measured = self.next_token.of_hidden(params, rest, hidden, batch, **others)
        terms = functools.partial(self.next_token.terms, params, rest)
        modules = [
            terms(hidden, batch[TARGETS][..., i], batch[SEGMENTS][..., i])
            for i, hidden in enumerate(self._hidden(sown))
        ]
        share = self.scale / self.modules
        minimized |= {_name(name): share * jnp.stack([module[name] for module in modules]) for name in modules[0]}
        return Sums(minimized, measured, {kind.__name__: sown[kind.__name__] for kind in capture})

    def evaluation(self, params: Any, rest: Any, batch: Batch, **others: Any) -> Evaluation:
        """See `Objective.evaluation`. With `evaluated` = k, also reports mtp_acceptance_rate.

        The rate is computed over the tokens at which module k has a target. It is the share of these tokens at which
        module k's most likely token equals the most likely token of the model itself k tokens later.
        """
        if not self.evaluated:
            return self.next_token.evaluation(params, rest, batch, **others)
        hidden, sown = hidden_states(self.next_token.apply, params, rest, batch, None, self.captures)
        greatest = functools.partial(self.next_token.token_terms, params, rest, best=True)
        terms, own = greatest(hidden, batch["targets"])
        best: Any = own.best  # [b, t]; the shift below requires tokens in their original order
        best = jnp.pad(best[:, self.evaluated :], ((0, 0), (0, self.evaluated)))
        i = self.evaluated - 1
        bears_loss = batch[SEGMENTS][..., i] != 0
        _, greedy = greatest(self._hidden(sown)[i], batch[TARGETS][..., i])
        total = jnp.sum(jnp.where(batch["targets_segmentation"] != 0, terms["lm_loss"], 0))
        tokens = self.next_token.weights(batch).tokens
        nats = Mean(total, tokens)
        accepted = jnp.sum(bears_loss & (greedy.best == best), dtype=jnp.int32)
        rate = Mean(accepted, jnp.sum(bears_loss, dtype=jnp.int32))
        return Evaluation(tokens, nats, nats, {"mtp_acceptance_rate": rate})

    def _hidden(self, sown: Sown) -> list[jax.Array]:
        # Selected by path, because a block may also sow an MtpHidden.
        return [sown[MtpHidden.__name__][hidden_path(k)] for k in range(1, self.modules + 1)]


def _name(term: str) -> str:
    return "mtp_loss" if term == "lm_loss" else f"mtp_{term}"
