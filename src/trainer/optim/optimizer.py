"""The optimizer and the mask of trainable parameters."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from trainer.config import UserError
from trainer.optim.schedule import make_schedule

Mask = Callable[[Any], Any]


def make_optimizer(config, param_axes: Any) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) or plain SGD.

    Parameters that are not trainable keep their values and have no optimizer state.

    Args:
      config: resolved.
      param_axes: the logical axes of every parameter (`backends.Model.param_axes`).

    Raises:
      UserError: a mask matches no parameter.
    """
    _check_masks(config, param_axes)
    schedule = make_schedule(config)
    if config.opt_type == "sgd":
        inner = optax.sgd(schedule)
    else:
        inner = optax.adamw(
            schedule,
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            eps_root=config.adam_eps_root,
            weight_decay=config.adam_weight_decay,
            mu_dtype=jnp.dtype(config.mu_dtype),
            mask=_matching(config.adamw_mask, found=False) if config.adamw_mask else None,
        )
    if config.gradient_clipping_threshold:
        inner = optax.chain(optax.clip_by_global_norm(config.gradient_clipping_threshold), inner)
    if config.trainable_parameters_mask:
        is_trained = trainable(config)

        def labels(params: Any) -> Any:
            return jax.tree.map(lambda trained: "train" if trained else "freeze", is_trained(params))

        inner = optax.partition({"train": inner, "freeze": optax.set_to_zero()}, labels)
    return inner


def _check_masks(config, param_axes: Any) -> None:
    """Refuses a mask that matches no parameter: it would silently have no effect."""
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in tree_leaves_with_path(param_axes)]
    mistakes = [
        f"{key}=[{','.join(config[key])}]: found in no parameter's name"
        for key in ("adamw_mask", "trainable_parameters_mask")
        if config[key] and not any(re.search(pattern, name) for pattern in config[key] for name in names)
    ]
    if mistakes:
        raise UserError("\n  ".join([*mistakes, f"the parameters are: {', '.join(names)}"]))


def trainable(config) -> Mask:
    """A function from the tree of params to a tree of bools: True for trained parameters."""
    return _matching(config.trainable_parameters_mask or [""], found=True)


def _matching(patterns: Sequence[str], *, found: bool) -> Mask:
    """A function from a tree to a tree of bools: `found` where a leaf's name a/b/c matches one of `patterns`."""
    search = re.compile("|".join(f"(?:{pattern})" for pattern in patterns)).search

    def mask(tree: Any) -> Any:
        def one(path: Any, _: Any) -> bool:
            return bool(search(jax.tree_util.keystr(path, simple=True, separator="/"))) == found

        return jax.tree_util.tree_map_with_path(one, tree)

    return mask
