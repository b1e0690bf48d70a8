"""Parts of a train state that are stored in host memory between updates."""

from collections.abc import Callable
from typing import Any

import jax

from trainer.backends.base import Model, TrainTree
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.state.shardings import Tensor, tensors

HOST = "pinned_host"
# For each part of a TrainTree that can be offloaded: the configuration key that keeps this part in host memory.
KEYS = {"params": "parameter_memory_host_offload", "opt_state": "optimizer_memory_host_offload"}
_OFFLOADING = (*KEYS.values(), "teacher_memory_host_offload")

Fetch = Callable[[Any], Any]


def storage_shardings(config: Config, model: Model, abstract: Any, shardings: Any) -> Any:
    """Returns `shardings` of a native train state, with host memory for the parts that `config` offloads.

    Scalars stay on the device, because offloading them saves nothing.
    """

    def moved(tensor: Tensor, leaf: Any, sharding: Any) -> Any:
        key = KEYS.get(tensor.path[0])
        return sharding.with_memory_kind(HOST) if key and config[key] and leaf.ndim else sharding

    return jax.tree.map(moved, tensors(model, abstract), abstract, shardings)


def fetcher(config: Config, shardings: TrainTree) -> Fetch:
    """Returns a function for use under jit that moves the offloaded parts of a TrainTree to device memory.

    A part that is None stays None.

    Args:
      config: resolved.
      shardings: the shardings of the tree in device memory.
    """
    parts = [part for part, key in KEYS.items() if config[key]]

    def fetch(tree: TrainTree) -> TrainTree:
        there = [part for part in parts if getattr(tree, part) is not None]
        moved = {part: jax.device_put(getattr(tree, part), getattr(shardings, part)) for part in there}
        # The compiler must not all-gather arrays that are still in host memory.
        return tree._replace(**jax.lax.optimization_barrier(moved))

    return fetch


def check_host_memory(config: Config, memory_kinds: list[str]) -> None:
    """Checks that the devices have pinned host memory if the configuration offloads arrays to it.

    Raises:
      UserError: the devices have none; the message names the offloading keys that are set.
    """
    given = [f"{key}=true" for key in _OFFLOADING if config[key]]
    if given and HOST not in memory_kinds:
        has = ", ".join(sorted(memory_kinds)) or "none that is known"
        raise UserError(f"{' '.join(given)}: these devices have no {HOST} memory (they have {has}); set false instead")
