"""QK-Clip (MuonClip in Kimi K2, arXiv:2507.20534): scales query and key weights to keep attention logits bounded."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.layers.clip import Clipped
from trainer.layers.sown import MaxLogit
from trainer.optim.optimizer import trainable
from trainer.optim.rules import Rule

NAME = "qk_clip"


def qk_clip(config: Config, param_axes: Any, layers: Mapping[str, Clipped]) -> Rule:
    """Returns the rule that, after an update, scales the logits of each head by eta = min(1, tau / largest logit).

    tau is `qk_clip_threshold`. The rule acts in every `qk_clip_interval`-th step, starting with step 0.

    The largest logit of a head is measured over the whole batch in the step's forward pass, before the update. Each
    layer declares the weights that eta scales (`layers.clip`). A layer is not clipped if all of these weights are
    frozen. The rule's state is also its metrics: `max_logit`, the largest logit of all heads in the last step in which
    the rule acted, and `clipped_heads`, the number of heads with eta < 1 (0 in a step in which the rule does not act).

    Args:
      config: resolved.
      param_axes: a tree with the structure of the model's parameters; its leaves are ignored.
      layers: see `models.clipped.clipped_layers`.

    Raises:
      UserError: some, but not all, of the weights that eta scales in a layer are frozen; or all weights that eta scales
        are frozen, in all layers.
    """
    stating, layers = set(layers), _not_frozen(config, param_axes, layers)
    tau, interval = config.qk_clip_threshold, config.qk_clip_interval
    due = None if interval == 1 else lambda step: step % interval == 0

    def init(params: Any) -> dict[str, jax.Array]:
        del params
        return {"max_logit": jnp.zeros(()), "clipped_heads": jnp.zeros((), jnp.int32)}

    def update(state: Any, old: Any, new: Any, sown: Any) -> tuple[Any, Any]:
        sampled = None if due is None else due(old.step)
        of_layers = sown[MaxLogit.__name__]
        _check_sown(stating, {path.removesuffix("/max_logit") for path in of_layers})
        params, clipped = new.params, jnp.zeros((), jnp.int32)
        for path, layer in layers.items():
            largest = of_layers[f"{path}/max_logit"]  # [..., heads]; the leading axes index stacked layers
            over = largest > tau if sampled is None else sampled & (largest > tau)
            clipped += over.sum(dtype=jnp.int32)
            eta = jnp.where(over, tau / largest, 1.0)
            params = _replaced(params, path.split("/"), functools.partial(scaled, factors=layer.logit_factors, eta=eta))
        largest = jnp.stack([array.max() for array in of_layers.values()]).max()
        if sampled is not None:
            largest = jnp.where(sampled, largest, state["max_logit"])
        return {"max_logit": largest, "clipped_heads": clipped}, new._replace(params=params)

    return Rule(NAME, init, update, (MaxLogit,), metrics=lambda state: state, due=due)


def scaled(params: Any, factors: Callable[[jax.Array], Any], eta: jax.Array) -> Any:
    """Returns the parameters of a layer after clipping.

    Args:
      params: the layer's parameters; leading axes index stacked layers.
      factors: the layer's `Clipped.logit_factors`.
      eta: float32 [..., heads], with the same leading axes.
    """
    stacked = eta.ndim - 1
    for _ in range(stacked):
        factors = jax.vmap(factors)

    def times(leaf: jax.Array, factor: jax.Array) -> jax.Array:
        between = (1,) * (leaf.ndim - factor.ndim)
        factor = factor.reshape(factor.shape[:stacked] + between + factor.shape[stacked:])
        assert jnp.broadcast_shapes(factor.shape, leaf.shape) == leaf.shape, (factor.shape, leaf.shape)
        return (leaf.astype(jnp.float32) * factor).astype(leaf.dtype)

    def below(params: Any, factors: Any) -> Any:
        if isinstance(factors, dict):
            return params | {name: below(params[name], factor) for name, factor in factors.items()}
        return jax.tree.map(lambda leaf: times(leaf, factors), params)

    return below(params, factors(eta))


def _replaced(params: Any, path: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """Returns `params` with `change` applied to the subtree at `path`."""
    if not path:
        return change(params)
    return params | {path[0]: _replaced(params[path[0]], path[1:], change)}


def _check_sown(stating: set[str], sowing: set[str]) -> None:
    """Raises UserError if a layer of a custom block defines `logit_factors` but sows no max_logit, or vice versa.

    `stating` are the paths of layers that define `logit_factors`, `sowing` those of layers that sow max_logit.
    """
    mistakes = [
        *(f"{path} defines logit_factors, but sows no max_logit" for path in sorted(stating - sowing)),
        *(f"{path} sows max_logit, but does not define logit_factors" for path in sorted(sowing - stating)),
    ]
    if mistakes:
        raise UserError(
            "\n  ".join(["use_qk_clip=true: some layers cannot be clipped (see trainer.layers.clip):", *mistakes])
        )


def _not_frozen(config: Config, param_axes: Any, layers: Mapping[str, Clipped]) -> dict[str, Clipped]:
    """Returns the layers to clip, that is, all layers except those in which the weights that eta scales are frozen."""
    is_trained = trainable(config)(param_axes)
    kept, mistakes = {}, []
    for path, layer in layers.items():
        below = is_trained
        for name in path.split("/"):
            below = below[name]
        factors = jax.eval_shape(layer.logit_factors, jax.ShapeDtypeStruct((layer.heads,), jnp.float32))
        flags = _flags(below, factors, path)
        if frozen := sorted(name for name, trained in flags.items() if not trained):
            if len(frozen) < len(flags):
                mistakes.append(f"{', '.join(frozen)}: frozen by trainable_parameters_mask")
        else:
            kept[path] = layer
    if mistakes:
        raise UserError(
            "\n  ".join(["use_qk_clip=true scales queries and keys together, but part of them is frozen:", *mistakes])
        )
    if not kept:
        raise UserError(
            "use_qk_clip=true: trainable_parameters_mask freezes the queries and keys of all layers; leave out one of "
            "the two"
        )
    return kept


def _flags(is_trained: Any, factors: Any, path: str) -> dict[str, bool]:
    """Returns whether a parameter is trained, by name, for each parameter that has a factor."""
    if isinstance(factors, dict):
        return {
            name: trained
            for child, factor in factors.items()
            for name, trained in _flags(is_trained[child], factor, f"{path}/{child}").items()
        }
    if isinstance(is_trained, dict):
        return {
            name: trained
            for child, below in is_trained.items()
            for name, trained in _flags(below, factors, f"{path}/{child}").items()
        }
    return {path: is_trained}
