"""The exponential moving average of the parameters."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.config.keys import Config
from trainer.optim.optimizer import trainable
from trainer.optim.rules import Rule, WithRules

NAME = "ema"
# In a checkpoint, the average of the parameter a/b/c is stored under AVERAGE + "/a/b/c".
AVERAGE = f"opt_state/rules/{NAME}/average"


class Average(NamedTuple):
    """The state of `averaging`."""

    average: Any  # averages of the trained parameters, float32; None for untrained parameters
    updates: jax.Array  # int32 [], the number of updates in the average


def averaging(config: Config) -> Rule:
    """Returns the update rule that averages the trained parameters after each update.

    With d = `ema_decay` and the parameters p_i after update i, the average after t updates is
    sum_i d^(t - i) p_i / sum_i d^(t - i). This average does not include the initial parameters. Before the first
    update, the average equals the initial parameters.
    """
    is_trained = trainable(config)
    log = math.log(config.ema_decay)

    def init(params: Any) -> Average:
        kept = jax.tree.map(
            # Also copies float32 parameters, so that no buffer is donated twice.
            lambda trained, param: jnp.array(param, jnp.float32) if trained else None,
            is_trained(params),
            params,
        )
        return Average(kept, jnp.zeros((), jnp.int32))

    def update(state: Average, old: Any, new: Any, sown: Any) -> tuple[Average, Any]:
        del old, sown
        count = state.updates + 1
        t = count.astype(jnp.float32)
        # (1 - d) / (1 - d^t) without cancellation; 1 in the first update.
        weight = math.expm1(log) / jnp.expm1(t * log)

        def one(average: jax.Array | None, param: jax.Array) -> jax.Array | None:
            return None if average is None else average + weight * (param.astype(jnp.float32) - average)

        return Average(jax.tree.map(one, state.average, new.params, is_leaf=_absent), count), new

    return Rule(NAME, init, update)


def averaged(tree: Any) -> Any:
    """Returns the parameters to evaluate, in their dtypes: the average of each parameter whose average is in the
    optimizer state, and all other parameters unchanged."""
    rules = tree.opt_state.rules if isinstance(tree.opt_state, WithRules) else {}
    if NAME not in rules:
        return tree.params

    def one(average: jax.Array | None, param: jax.Array) -> jax.Array:
        return param if average is None else average.astype(param.dtype)

    return jax.tree.map(one, rules[NAME].average, tree.params, is_leaf=_absent)


def _absent(node: Any) -> bool:
    return node is None
