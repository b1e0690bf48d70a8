"""The choice of the named tensors that a checkpointed block keeps for its backward pass.

Layers name tensors with `jax.ad_checkpoint.checkpoint_name`. Every policy keeps a block's input. Of the tensors that a
policy lists, only those that the backward pass reads are kept. For example, mlpwo takes no memory if it is only added
to the residual stream. Every policy also keeps the cos/sin tables of RoPE, which are the same in every layer. A rolled
loop keeps the tables once, outside of the loop; in an unrolled loop the compiler merges them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from trainer.config.capabilities.remat_tensors import ATTENTION, LAYER_INPUT, PROJECTIONS, QKV, QUANTIZED
from trainer.ops.rope import ROTATION

# The second argument of jax.checkpoint.
Policy = Callable[..., Any]

# For each remat_policy, the tensors kept on the device in addition to the block's input.
KEPT: dict[str, tuple[str, ...]] = {
    "full": (),
    "minimal": PROJECTIONS,
    "minimal_with_quantization": (*PROJECTIONS, QUANTIZED),
    "minimal_with_context": (*PROJECTIONS, "context"),
    "minimal_with_context_and_quantization": (*PROJECTIONS, "context", QUANTIZED),
    "minimal_flash": (*PROJECTIONS, "context"),
    "save_dot_with_context_except_mlp": (*ATTENTION, "context"),
    "save_dot_except_mlpwi": (*ATTENTION, "mlpwo"),
    "save_dot_except_mlp": ATTENTION,
    "save_qkv_proj": QKV,
    "save_out_proj": ("out_proj",),
}
# For each remat_policy, the tensors kept in pinned host memory.
OFFLOADED: dict[str, tuple[str, ...]] = {"qkv_proj_offloaded": QKV, "minimal_offloaded": PROJECTIONS}


def kept(name: str, own: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the names of the tensors that the policy `name` keeps on the device: () for none, custom, and the keys of
    OFFLOADED. `own`: see `make_policy`."""
    return () if name in ("none", "custom", *OFFLOADED) else _with(own, KEPT[name])


def _with(own: Sequence[str], tensors: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `tensors`, with the names in `own` (see `make_policy`) added if `tensors` includes all PROJECTIONS."""
    return (*tensors, *own) if set(PROJECTIONS) <= set(tensors) else tensors


def offloaded(name: str, choices: Mapping[str, str], own: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the names of the tensors that the policy `name` offloads to pinned host memory. See `make_policy` for the
    arguments."""
    if name == "custom":
        return tuple(tensor for tensor, choice in choices.items() if choice == "offload")
    return _with(own, OFFLOADED.get(name, ()))


def make_policy(name: str, choices: Mapping[str, str], own: Sequence[str] = (), stage: bool = False) -> Policy | None:
    """Returns the policy of `jax.checkpoint` for a block, or None if no block is checkpointed.

    Args:
      name: none, custom, or a key of KEPT or OFFLOADED.
      choices: for custom, the choice for each tensor (`capabilities.remat_tensors.TENSORS`): remat, device or offload.
      own: a family's projection names in addition to PROJECTIONS. A policy that keeps all PROJECTIONS keeps these, too.
      stage: whether the checkpointed function runs several blocks. If so, the policy also keeps each block's input; for
        custom, only if `choices` keeps it on the device.
    """
    if name == "none":
        return None
    if name == "custom":
        saved = tuple(tensor for tensor, choice in choices.items() if choice == "device" and tensor != LAYER_INPUT)
    else:
        saved = kept(name, own)
    if stage and (name != "custom" or choices[LAYER_INPUT] == "device"):
        saved = (*saved, LAYER_INPUT)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(*saved, ROTATION),
        names_which_can_be_offloaded=offloaded(name, choices, own),
        offload_src="device",
        offload_dst="pinned_host",
    )
