"""The rematerialization policy of a configuration."""

from collections.abc import Iterable

from trainer.config.capabilities.remat_tensors import OWN_TENSORS, TENSORS
from trainer.config.errors import UserError, nearest
from trainer.config.keys import Config
from trainer.layers.remat import Policy, make_policy, offloaded
from trainer.models.families import family


def remat_policy(config: Config, stage: bool = False) -> Policy | None:
    """Returns the policy that determines what a checkpointed block saves, or None if no block is checkpointed.

    `stage`: whether the policy is for an iteration of a pipeline stage, which runs several blocks, rather than for one
    block; see `layers.remat.make_policy`.

    Raises:
      UserError: `config` names tensors that the family does not declare; the message lists these tensors.
    """
    return make_policy(config.remat_policy, _choices(config), family(config.decoder_block).projections, stage)


def check_offload(config: Config, memory_kinds: Iterable[str]) -> None:
    """Refuses offloading to pinned host memory if the devices have none.

    Args:
      config: a configuration, which need not be resolved.
      memory_kinds: the kinds of memory that a device of the mesh can address (`device.addressable_memories()`).

    Raises:
      UserError: `config` offloads tensors, but the devices have no pinned host memory. The message names the offloaded
        tensors and an alternative.
    """
    kinds = sorted(set(memory_kinds))
    tensors = offloaded(config.remat_policy, _choices(config), family(config.decoder_block).projections)
    if not tensors or "pinned_host" in kinds:
        return
    has = f"these devices have no pinned_host memory (they have {', '.join(kinds) or 'no known kind of memory'})"
    if config.remat_policy == "custom":
        given = ", ".join(
            f"{tensor}=offload" if tensor in TENSORS else f"custom_offload_tensors={tensor}" for tensor in tensors
        )
        instead = "device" if "decoder_layer_input" in tensors else "device or remat"
        raise UserError(f"remat_policy=custom with {given}: {has}; choose {instead} for each")
    instead = {"qkv_proj_offloaded": "save_qkv_proj", "minimal_offloaded": "minimal"}[config.remat_policy]
    raise UserError(
        f"remat_policy={config.remat_policy}: {has}; choose {instead}, which keeps the same tensors on the device, or "
        "full, which keeps none"
    )


def _choices(config: Config) -> dict[str, str]:
    """Returns a dict from each tensor's name to what remat_policy=custom does with it: remat, device or offload."""
    choices = {tensor: config[tensor] for tensor in TENSORS}
    if config.remat_policy != "custom":
        return choices
    found = family(config.decoder_block)
    own = [*found.projections, *found.tensors]
    given = [(key, name) for key in OWN_TENSORS for name in config[key]]
    has = f"declares only {', '.join(own)}" if own else "declares none"
    if problems := [
        f"{key}: decoder_block={config.decoder_block} does not declare {name}, it {has}{nearest(name, own)}"
        for key, name in given
        if name not in own
    ]:
        raise UserError("\n  ".join(problems))
    return choices | {name: OWN_TENSORS[key] for key, name in given}
