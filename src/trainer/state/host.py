"""Parts of a train state that are stored in host memory between updates."""

from collections.abc import Callable
from typing import Any

import jax

from trainer.backends import Model, TrainTree
from trainer.config import UserError
from trainer.state.shardings import Tensor, tensors

HOST = "pinned_host"
# The key that keeps a part of a TrainTree there.
KEYS = {"params": "parameter_memory_host_offload", "opt_state": "optimizer_memory_host_offload"}

Fetch = Callable[[Any], Any]


def storage_shardings(config: Any, model: Model, abstract: Any, shardings: Any) -> Any:
    """`shardings` of a native train state, in host memory where the configuration says so.

    Scalars stay on the device: nothing is gained by moving them.
    """

    def moved(tensor: Tensor, leaf: Any, sharding: Any) -> Any:
        key = KEYS.get(tensor.path[0])
        return sharding.with_memory_kind(HOST) if key and config[key] and leaf.ndim else sharding

    return jax.tree.map(moved, tensors(model, abstract), abstract, shardings)


def fetcher(config: Any, shardings: TrainTree) -> Fetch:
    """A function for inside of jit: a TrainTree with what is stored in host memory brought to the device.

    A part that is None stays None.

    Args:
      config: resolved.
      shardings: of the tree on the device.
    """
    parts = [part for part, key in KEYS.items() if config[key]]

    def fetch(tree: TrainTree) -> TrainTree:
        there = [part for part in parts if getattr(tree, part) is not None]
        moved = {part: jax.device_put(getattr(tree, part), getattr(shardings, part)) for part in there}
        # The compiler must not gather between devices what still lies in the host's memory.
        return tree._replace(**jax.lax.optimization_barrier(moved))

    return fetch


def check_host_memory(config: Any, memory_kinds: list[str]) -> None:
    """Refuses these keys where the devices have no pinned host memory.

    Raises:
      UserError: the keys that are set.
    """
    given = [f"{key}=true" for key in KEYS.values() if config[key]]
    if given and HOST not in memory_kinds:
        has = ", ".join(sorted(memory_kinds)) or "none that is known"
        raise UserError(f"{' '.join(given)}: these devices have no {HOST} memory (they have {has}); leave it false")
