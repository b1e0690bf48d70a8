"""The initial train state."""

from collections.abc import Callable
from typing import Any

import jax

from trainer.backends import Backend
from trainer.ops.random import seed_key


def init_state_fn(backend: Backend, shardings: Any, seed: int) -> Callable[[], Any]:
    """A function that makes the native train state at step 0 where it will live: each device computes its own shard.

    Args:
      backend: whose native state to make.
      shardings: from `state_shardings`.
      seed: of the initial parameters; the same for every combination and every mesh.
    """
    init = jax.jit(backend.init, out_shardings=shardings)
    return lambda: init(seed_key(seed))
