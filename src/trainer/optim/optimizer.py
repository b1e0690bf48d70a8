"""Builds the configured optimizer, and the masks of decayed and of trained parameters."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainer.config.capabilities.lora_keys import trained_patterns
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.ops.paths import by_name, listed, whole_name
from trainer.optim.axes import is_matrix
from trainer.optim.groups import factors, in_groups
from trainer.optim.keys import Given, Mask, from_names, keys_of
from trainer.optim.registry import OPTIMIZERS
from trainer.optim.schedule import make_schedule


def make_optimizer(config: Config, param_axes: Any) -> optax.GradientTransformation:
    """Returns the optimizer of the trained parameters: clipping, then the optimizer `opt_type`, then the factors of
    `learning_rate_groups`.

    Parameters and gradients are converted to float32. Updates and state are float32, except for the parts of the state
    whose dtype is `mu_dtype`; only the updated parameters are rounded to their dtype. Untrained parameters keep their
    values and have no optimizer state.

    Args:
      config: the resolved configuration.
      param_axes: the logical axes of every parameter (`backends.Model.param_axes`).

    Raises:
      UserError: a mask or a pattern of `learning_rate_groups` matches no parameter.
    """
    _check_masks(config, param_axes)
    given = Given(make_schedule(config), decayed(config, param_axes), param_axes)
    tx = OPTIMIZERS[config.opt_type](keys_of(config), given)
    return _of_trained(config, _in_float32(in_groups(_clipped(config, tx), _factors(config, param_axes))))


def _in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    inner = optax.with_extra_args_support(tx)

    def exact(tree: Any) -> Any:
        return optax.tree.cast(tree, jnp.float32)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return inner.update(exact(grads), state, exact(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: tx.init(exact(params)), update)


def _clipped(config: Config, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `tx` preceded by gradient clipping: first of each element, then of the global norm."""
    value, threshold = config.gradient_clipping_value, config.gradient_clipping_threshold
    first = [optax.clip(value)] if value else []
    first += [optax.clip_by_global_norm(threshold)] if threshold else []
    return optax.chain(*first, tx) if first else tx


def _factors(config: Config, param_axes: Any) -> dict[str, float]:
    is_trained = by_name(trainable(config)(param_axes))
    return factors(config, [name for name, trained in is_trained.items() if trained])


def _of_trained(config: Config, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `tx` applied only to the trained parameters."""
    if not trained_patterns(config):
        return tx
    is_trained = trainable(config)

    def labels(params: Any) -> Any:
        return jax.tree.map(lambda trained: "train" if trained else "freeze", is_trained(params))

    return optax.partition({"train": tx, "freeze": optax.set_to_zero()}, labels)


def _check_masks(config: Config, param_axes: Any) -> None:
    """Raises UserError if a mask matches no parameter and so has no effect."""
    names = list(by_name(param_axes))
    mistakes = [
        f"{key}=[{','.join(config[key])}]: matches no parameter"
        for key in ("adamw_mask", "trainable_parameters_mask")
        if config[key] and not any(re.search(pattern, whole_name(name)) for pattern in config[key] for name in names)
    ]
    if mistakes:
        raise UserError("\n  ".join([*mistakes, f"the parameters are: {listed(names)}"]))


def decayed(config: Config, param_axes: Any) -> Mask:
    """Returns a function that maps the tree of params to a tree of bools: True for parameters with weight decay.

    If `adamw_mask` is None, the matrices decay; the logical axes of a parameter determine whether it is a matrix
    (`optim.axes`). Otherwise, all parameters decay except those that match a pattern of `adamw_mask`.
    """
    if config.adamw_mask is None:
        decays = {name: is_matrix(axes) for name, axes in by_name(param_axes).items()}
        return from_names(decays.__getitem__)
    return _matching(config.adamw_mask, if_matched=False)


def trainable(config: Config) -> Mask:
    """Returns a function that maps the tree of params to a tree of bools: True for trained parameters."""
    return _matching(trained_patterns(config) or [""], if_matched=True)


def _matching(patterns: Sequence[str], *, if_matched: bool) -> Mask:
    """Returns a function that maps a tree to a tree of bools: `if_matched` for the leaves whose name a/b/c matches a
    pattern, and the opposite for all others."""
    searches = [re.compile(pattern).search for pattern in patterns]
    return from_names(lambda name: any(search(whole_name(name)) for search in searches) == if_matched)
