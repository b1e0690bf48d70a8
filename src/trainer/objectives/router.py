"""The router losses of mixtures of experts, added to the terms of another objective."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trainer.config.errors import UserError
from trainer.layers.sown import RouterLoss
from trainer.objectives.base import Batch, Evaluation, Field, Objective, Sums, Weights, reads_of

# For each term: its name, and the last component of the path under which a layer sows the term's values.
BALANCE, Z = ("moe_lb_loss", "load_balance"), ("router_z_loss", "z")
KEYS = {BALANCE[0]: "load_balance_loss_weight", Z[0]: "router_z_loss_weight"}


@dataclass(frozen=True)
class WithRouters:
    """The terms of the wrapped `objective` and, if their factors `balance` and `z` are above 0, these terms:
      moe_lb_loss: `balance` times the mean over layers and rows of `ops.routing.load_balance`;
      router_z_loss: `z` times the mean over layers and tokens of the squared log of the router's softmax normalizer.

    The means exclude padding rows and padding tokens. They include every layer with a router, even in multi-token
    prediction modules. Evaluation omits both terms.
    """

    objective: Objective
    balance: float
    z: float

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.objective.fields

    @property
    def captures(self) -> tuple[type, ...]:
        return (*self.objective.captures, RouterLoss)

    @property
    def reads(self) -> Collection[str]:
        return reads_of(self.objective)

    def __getattr__(self, name: str) -> Any:
        """Returns an optional attribute of `Objective` from the wrapped objective."""
        if name.startswith("__"):  # while an object is copied, it does not have `objective` yet
            raise AttributeError(name)
        return getattr(self.objective, name)

    def weights(self, batch: Batch) -> Weights:
        real_bt = batch["inputs_segmentation"] != 0
        rows, tokens = jnp.sum(real_bt.any(-1), dtype=jnp.int32), jnp.sum(real_bt, dtype=jnp.int32)
        own = {BALANCE[0]: rows, Z[0]: tokens}
        inner = self.objective.weights(batch)
        return inner._replace(terms=inner.terms | own)

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
        types = tuple(dict.fromkeys((*capture, RouterLoss)))
        inner = self.objective.sums(params, rest, batch, key, types, sampled, **others)
        sown = inner.sown[RouterLoss.__name__]
        own = {}
        for (term, name), weight in ((BALANCE, self.balance), (Z, self.z)):
            if weight:
                # A sown value is of one layer or, with an additional axis, of all layers of a stack.
                values = [value.reshape(-1) for path, value in sown.items() if path.rpartition("/")[2] == name]
                if not values:
                    raise UserError(
                        f"{KEYS[term]}={weight}: no layer sows a RouterLoss named {name} (trainer.layers.moe)"
                    )
                own[term] = weight * jnp.concatenate(values).mean()
        asked = {kind.__name__: inner.sown[kind.__name__] for kind in capture}
        return Sums(inner.minimized | own, inner.measured, asked)

    def evaluation(self, params: Any, rest: Any, batch: Batch, **others: Any) -> Evaluation:
        return self.objective.evaluation(params, rest, batch, **others)
