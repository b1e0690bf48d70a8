"""What an entry of the registry of optimizers is given."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import optax

from trainer.config.optimizers import TRAITS
from trainer.ops.paths import name_of

# From a tree of params to a tree of bools.
Mask = Callable[[Any], Any]


class Given(NamedTuple):
    """What follows from the configuration and the model, the same for every optimizer."""

    schedule: optax.Schedule
    decayed: Mask  # True for parameters with weight decay
    param_axes: Any  # the logical axes of every parameter, a nested dict of canonical names


def keys_of(config) -> SimpleNamespace:
    """The keys that the configured optimizer reads, as attributes; it has no others."""
    return SimpleNamespace(**{key: config[key] for key in TRAITS[config.opt_type].reads})


def from_names(value: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A function from a tree to a tree of `value(name)`, by each leaf's name a/b/c."""
    return lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: value(name_of(path)), tree)
