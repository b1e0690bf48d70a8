"""Router biases that balance the load of experts without an auxiliary loss (Wang et al. 2024, arXiv:2408.15664)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.layers.sown import RouterCount
from trainer.ops.paths import by_name, path_of
from trainer.optim.rules import Rule

NAME = "router_bias"
# The paths of the router's sown token counts and of the router's bias, relative to the MoE layer (`layers.moe`).
_COUNT, _BIAS = "tokens_per_expert", "gate/bias"


def router_bias(config: Config, rest: Any) -> Rule:
    """Returns the rule that adjusts every expert's bias to bring the expert's load closer to the mean load.

    In each accepted step, the rule adds `routed_bias_update_rate` times the sign of (mean load - load) to each expert's
    bias. The load is the number of tokens in the whole batch that chose the expert. The rule has no state, because the
    biases are in `TrainTree.rest`.

    Args:
      config: resolved.
      rest: the model's `TrainTree.rest`, as arrays or ShapeDtypeStructs.

    Raises:
      UserError: no router of the model has a bias.
    """
    rate = config.routed_bias_update_rate
    if not any(_is_bias(name) for name in by_name(rest)):
        raise UserError(
            f"routed_bias=true: no router of this model has a bias (a buffer with a path that ends in {_BIAS}; see "
            "trainer.layers.moe)"
        )

    def update(state: Any, old: Any, new: Any, sown: Any) -> tuple[Any, Any]:
        counts: Mapping[str, jax.Array] = sown[RouterCount.__name__]

        def moved(path: Any, leaf: jax.Array) -> jax.Array:
            name = "/".join(path_of(path))
            count = counts.get(name.removesuffix(_BIAS) + _COUNT) if _is_bias(name) else None
            return leaf if count is None else leaf + rate * direction(count).astype(leaf.dtype)

        return state, new._replace(rest=jax.tree_util.tree_map_with_path(moved, new.rest))

    return Rule(NAME, lambda params: {}, update, sown=(RouterCount,))


def _is_bias(name: str) -> bool:
    return name == _BIAS or name.endswith(f"/{_BIAS}")


def direction(count: jax.Array) -> jax.Array:
    """Returns the sign of (mean - count), int32 like `count`, where mean is the mean of `count` over the last axis.

    The sign is exact, because it is computed with integers.
    """
    total, experts = count.sum(-1, keepdims=True), count.shape[-1]
    whole, remainder = total // experts, total % experts
    below = (count < whole) | ((count == whole) & (remainder > 0))
    return jnp.where(below, 1, jnp.where(count > whole, -1, 0))
