"""Muon's dimension numbers, from a configuration or from NNX or Linen parameters."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
from flax import nnx
from flax.core import meta, unfreeze

from trainer.backends.nnx_model import axes_of_params
from trainer.backends.registry import make_model
from trainer.config.capabilities.pipeline_keys import SIZES
from trainer.config.derived import DCN, ICI
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.resolve import resolve
from trainer.layers.param import unnamed
from trainer.models.families import in_stack, leading_axes, stacks
from trainer.ops.paths import by_name, name_of
from trainer.optim.muon import dimension_numbers
from trainer.sharding import LAYERS, Axes

# Parameters and their axes do not depend on these keys. With these values, every configuration fits one device.
_ALONE = {
    **dict.fromkeys((*ICI.values(), *DCN.values()), 1),
    "hardware": "",
    "per_device_batch_size": 1.0,
    "eval_per_device_batch_size": 1.0,
    "num_vocab_tiling": 1,
    "attention": "dot_product",
}


def get_muon_weight_dimension_numbers(source: Any, config: Config | None = None) -> Any:
    """Returns `MuonDimensionNumbers` for every matrix that Muon orthogonalizes, and None for all other parameters.

    The dimension numbers are derived from the logical axes of the parameters, never from their names (`optim.axes`), so
    the parameters of a user-defined block need no declaration. Pass them to `optax.contrib.muon` as a function:
    `muon_weight_dimension_numbers=lambda params: ...`. With `opt_type=muon`, this call is not needed.

    Args:
      source: one of these: a configuration, resolved or not; the canonical dict of the parameters or of their logical
        axes; an `nnx.State` of a model or of a whole train state, abstract or not; or Linen's params, variables or
        TrainState, boxed or not.
      config: the model's configuration. Needed only for arrays without logical axes (a canonical dict, or unboxed
        params such as in this trainer's TrainState), and for a pipeline with a user-defined block whose parameters have
        no axis names.

    Returns:
      A nested dict with the parameter names of `source`. For a train state, they are nested below `model` or
      `params`. For a configuration, they are the canonical names.

    Raises:
      UserError: the arrays have no logical axes and `config` is missing or has other parameters.
    """
    if isinstance(source, ml_collections.ConfigDict | ml_collections.FrozenConfigDict):
        return dimension_numbers(_axes_of_model(source))
    if isinstance(source, nnx.State):
        if "model" in source and set(source) <= {"model", "optimizer"}:  # a TrainStateNNX
            return {"model": _of_model(source["model"], config)}
        return _of_model(source, config)
    if hasattr(source, "opt_state"):  # a Linen TrainState
        return {"params": dimension_numbers(_axes_of_dict(unfreeze(source.params), config))}
    params = unfreeze(source)
    if set(params) >= {"params"}:
        return {"params": dimension_numbers(_axes_of_dict(params["params"], config))}
    return dimension_numbers(_axes_of_dict(params, config))


def _of_model(state: nnx.State, config: Config | None) -> Any:
    return dimension_numbers(axes_of_params(nnx.filter_state(state, nnx.Param), _leading(config)))


def _axes_of_dict(params: Mapping[str, Any], config: Config | None) -> Any:
    """Returns the logical axes of the parameters in a nested dict."""
    leaves = jax.tree.leaves(params, is_leaf=_is_box)
    known: dict[str, Axes] | None = None
    leading = _leading(config)
    if not any(isinstance(leaf, Axes | meta.Partitioned) for leaf in leaves):
        if config is None:
            raise UserError("these arrays have no logical axes: pass config=, the configuration of their model")
        known = by_name(_axes_of_model(config))

    def one(path: Any, leaf: Any) -> Axes:
        if isinstance(leaf, Axes):
            return leaf
        if isinstance(leaf, meta.Partitioned):
            return Axes(leaf.names)
        if known is None:
            return Axes(unnamed(leaf.ndim, leading(name_of(path))))
        name = name_of(path)
        if name not in known:
            raise UserError(f"the model of config has no parameter {name}")
        return known[name]

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=_is_box)


def _leading(config: Config | None) -> Callable[[str], Sequence[str]]:
    """Returns a function that maps a parameter's name to the logical names of the axes that stack its layers. If
    `config` is None, the function assumes that there is no pipeline."""
    if config is not None:
        return functools.partial(leading_axes, stacks(_alone(config)))
    return lambda name: (LAYERS,) if in_stack(name) else ()


def _alone(config: Config) -> Any:
    """Returns `config` resolved for one device, but with the pipeline stages of `config`."""
    if any(config[key] == -1 for key in SIZES):
        raise UserError(f"{' or '.join(SIZES)} is -1: give the resolved configuration, whose stages are known")
    alone = resolve({**config, **_ALONE}, device_count=1, platform="cpu")
    return type(alone)({**alone, **{key: config[key] for key in SIZES}})


def _axes_of_model(config: Config) -> Any:
    return make_model(_alone(config)).param_axes


def _is_box(node: Any) -> bool:
    return isinstance(node, meta.Partitioned)  # a Linen box, with logical names or names of mesh axes
