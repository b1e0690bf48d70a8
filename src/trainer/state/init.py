"""The initial train state."""

from collections.abc import Callable
from typing import Any

import jax

from trainer.backends.base import Codec, TrainTree
from trainer.ops.random import seed_key
from trainer.state.host import Fetch


def init_state_fn(
    codec: Codec, shardings: Any = None, seed: int = 0, fetch: Fetch = lambda tree: tree
) -> Callable[..., Any]:
    """Returns `init(params=None, rest=None, step=None)`, a function that returns a native train state, sharded.

    The optimizer state is new. Each device computes its own shard. If `params` or `rest` (canonical and sharded) are
    given, their buffers are donated to the state. `step`: see `StateCodec.init`.

    Args:
      codec: makes the native state.
      shardings: from `state_shardings`, or None for JAX's default.
      seed: seed of the initial parameters, which are equal for NNX and Linen, and for every mesh.
      fetch: moves parameters from host memory to the device (`state.host.fetcher`).
    """

    def make(key: jax.Array, params: Any, rest: Any, step: Any) -> Any:
        if params is not None:
            params = fetch(TrainTree(None, params, None, None)).params
        return codec.init(key, params, rest, step)

    init = jax.jit(make, out_shardings=shardings, donate_argnums=(1, 2))
    return lambda params=None, rest=None, step=None: init(seed_key(seed), params, rest, step)
