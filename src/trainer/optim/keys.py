"""What an entry of the registry of optimizers is given."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import optax

from trainer.config.optimizers import READS

# From a tree of params to a tree of bools.
Mask = Callable[[Any], Any]


class Given(NamedTuple):
    """What follows from the configuration and the model, the same for every optimizer."""

    schedule: optax.Schedule
    decayed: Mask  # True for parameters with weight decay
    param_axes: Any  # the logical axes of every parameter, a nested dict of canonical names


def keys_of(config) -> SimpleNamespace:
    """The keys that the configured optimizer reads, as attributes; it has no others."""
    return SimpleNamespace(**{key: config[key] for key in READS[config.opt_type]})
