"""The arguments with which registered optimizers are called."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import optax

from trainer.config.capabilities.optimizers import TRAITS
from trainer.config.keys import Config
from trainer.ops.paths import name_of

# Maps a tree of params to a tree of bools.
Mask = Callable[[Any], Any]


class Given(NamedTuple):
    """Values derived from the configuration and the model, the same for every optimizer."""

    schedule: optax.Schedule
    decayed: Mask  # True for parameters with weight decay
    param_axes: Any  # the logical axes of every parameter, a nested dict by canonical name


def keys_of(config: Config) -> SimpleNamespace:
    """Returns a namespace with only those configuration keys that the configured optimizer reads."""
    return SimpleNamespace(**{key: config[key] for key in TRAITS[config.opt_type].reads})


def from_names(value: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Returns a function that maps a tree to a tree of `value(name)`, where `name` is the leaf's name a/b/c."""
    return lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: value(name_of(path)), tree)
