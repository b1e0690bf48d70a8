"""Learning rates per group of parameters."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.tree_util import tree_map_with_path

from trainer.config.capabilities.optimizers import groups_of
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.ops.paths import name_of, whole_name


def factors(config: Config, names: Sequence[str]) -> dict[str, float]:
    """Returns the learning-rate factor of every parameter in `names` that matches a pattern of `learning_rate_groups`.

    The first matching pattern applies.

    Raises:
      UserError: a pattern is not the first match of any parameter, so it has no effect.
    """
    factor_of: dict[str, float] = {}
    unused = []
    for pattern, factor in groups_of(config.learning_rate_groups):
        matching = [name for name in names if re.search(pattern, whole_name(name))]
        if not set(matching) - factor_of.keys():
            taken = " that an earlier pattern does not match" if matching else ""
            unused.append(f"learning_rate_groups={pattern}={factor:g}: matches no trained parameter{taken}")
        factor_of = dict.fromkeys(matching, factor) | factor_of
    if unused:
        raise UserError("\n  ".join([*unused, f"the trained parameters are: {', '.join(names)}"]))
    return factor_of


def in_groups(tx: optax.GradientTransformation, factor_of: dict[str, float]) -> optax.GradientTransformation:
    """Returns `tx` with each update multiplied by the factor of its parameter. The state is the state of `tx`.

    If the last stage of `tx` multiplies by the learning rate, the factors scale the learning rate.
    """
    if not factor_of:
        return tx
    inner = optax.with_extra_args_support(tx)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(grads, state, params, **extra)
        return tree_map_with_path(scaled, updates), state

    def scaled(path: Any, leaf: jax.Array) -> jax.Array:
        name = name_of(path)
        return leaf * factor_of[name] if name in factor_of else leaf

    return optax.GradientTransformationExtraArgs(inner.init, update)
