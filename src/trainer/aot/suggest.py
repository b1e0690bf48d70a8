"""Suggests settings for a compiled step.

If the step does not fit, the settings reduce its memory, cheapest first. If it fits, the setting is a remat_policy that
saves more tensors.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from trainer.aot.recomputed import recomputed
from trainer.config.capabilities.optimizers import has_first_moment
from trainer.config.capabilities.pipeline_keys import stages
from trainer.config.capabilities.remat_tensors import PROJECTIONS
from trainer.config.capabilities.vocab_tiles import worthwhile_tiles
from trainer.config.derived import has_rollouts
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.topologies import GPUS, GPUS_OF_HOST
from trainer.layers.remat import KEPT, OFFLOADED, kept, offloaded
from trainer.models.families import family
from trainer.observe.text import si

EVERYTHING = ("context", *PROJECTIONS)
# Policies, ordered from the most to the fewest saved tensors, each with a description of what it recomputes.
_RECOMPUTED = {
    "minimal_with_context": "norms and activation functions are recomputed",
    "save_dot_with_context_except_mlp": "the MLP's input projections are recomputed",
    "full": "each block's forward pass is recomputed: about a third more FLOPs",
}
# Saved tensors take at most UNCERTAINTY times their estimated memory. A suggestion uses at most _USABLE of a device's
# memory: the rest is for evaluation, other programs, and compilers that use more memory when it is available.
# docs/benchmarks/remat.md compares estimates with compiled programs.
UNCERTAINTY, _USABLE = 1.25, 0.9


class Suggestion(NamedTuple):
    """A suggestion to change settings. `settings`: key=value arguments for the command line. `price`: a description of
    what the change costs. `state`: whether the change shrinks the train state."""

    settings: str
    price: str
    state: bool = False


def suggest(
    config: Config,
    *,
    needed: int,
    available: int,
    arguments: int = 0,
    check: Callable[[dict[str, Any]], Any] | None = None,
) -> tuple[Suggestion, ...]:
    """Returns settings that reduce a step's memory, cheapest first; () if the step fits.

    The order: free changes, rematerialization, host offload, more sharding, smaller batches, fewer bits, shorter rows.
    The suggestions are alternatives: apply one of them and compile again to see how much it saves.

    Args:
      config: the resolved configuration.
      needed: bytes that the step takes on a device.
      available: bytes of memory on a device.
      arguments: the part of `needed` for arguments. If the arguments alone do not fit, only settings that shrink the
        train state are suggested.
      check: called with all values of a changed configuration, to resolve them for the devices of the configuration's
        topology. If `check` raises UserError, the change is not suggested.
    """
    if needed <= available:
        return ()
    suggestions = []
    for suggestion, changes in _candidates(config):
        if (arguments <= available or suggestion.state) and _accepted(config, changes, check):
            suggestions.append(suggestion)
    return tuple(suggestions)


def affordable(config: Config, jaxpr: Any, platform: str, needed: int, available: float | None) -> Suggestion | None:
    """Returns the remat_policy that recomputes least among the policies that save more tensors than `config`'s policy
    and fit with a margin; None if no policy qualifies or the answer is unknown.

    The answer is unknown if `config`'s policy offloads tensors or chooses them one by one (custom), if a pipeline
    checkpoints each layer, or if the run makes rollouts, which need more memory. The policy `none` is never returned,
    because the size of the tensors that only `none` saves is unknown.

    Args:
      config: the resolved configuration.
      jaxpr: the jaxpr of the traced step.
      platform: the platform of the devices.
      needed: bytes that the compiled step takes on a device.
      available: bytes of memory on a device; None if unknown.
    """
    checkpoints_layers = stages(config) > 1 and config.set_remat_policy_on_layers_per_stage
    if available is None or config.remat_policy not in KEPT or has_rollouts(config) or checkpoints_layers:
        return None
    own, sizes = family(config.decoder_block).projections, recomputed(jaxpr, platform)
    for policy, price in _RECOMPUTED.items():
        more = sum(sizes.get(tensor, 0) for tensor in kept(policy, own))
        saves_all = set(KEPT[policy]) >= set(KEPT[config.remat_policy]) - {"mlpwo"}
        if more and saves_all and needed + UNCERTAINTY * more <= _USABLE * available:
            sizes_text = f"{si(needed + more, 'B').strip()} of {si(available, 'B').strip()}"
            return Suggestion(f"remat_policy={policy}", f"would take about {sizes_text} per device, and {price}")
    return None


def _accepted(config: Config, changes: dict[str, Any], check: Callable[[dict[str, Any]], Any] | None) -> bool:
    if any(key not in config for key in changes):
        return False
    if check is None:
        return True
    try:
        check(dict(config.items()) | changes)
    except UserError:
        return False
    return True


# (changed keys with their new values, a description of the cost, whether the change shrinks the train state)
Candidate = tuple[dict[str, Any], str, bool]


def _candidates(config: Config) -> Iterator[tuple[Suggestion, dict[str, Any]]]:
    for kind in (_free, _recompute, _offload, _shard, _less):
        for changes, price, state in kind(config):
            words = {key: "true" if value is True else value for key, value in changes.items()}
            yield Suggestion(" ".join(f"{key}={word}" for key, word in words.items()), price, state), changes


def _free(config: Config) -> Iterator[Candidate]:
    if not config.scan_layers:
        yield {"scan_layers": True}, "free: a rolled loop needs the temporaries of only one layer", False
    if config.attention == "dot_product":
        yield {"attention": "flash"}, "free: the kernel never materializes the score matrix", False


def _recompute(config: Config) -> Iterator[Candidate]:
    if (tiles := worthwhile_tiles(config)) > config.num_vocab_tiling == 1:
        yield {"num_vocab_tiling": tiles}, "logits are recomputed: one more product with the head per token", False
    saved = _kept(config)
    for policy, price in _RECOMPUTED.items():
        if set(KEPT[policy]) - {"mlpwo"} < saved:
            yield {"remat_policy": policy}, price, False


def _kept(config: Config) -> set[str]:
    """Returns the names of the tensors that blocks save on the device in addition to their inputs. The name
    "everything" stands for all unnamed tensors."""
    if config.remat_policy == "none":
        return {*EVERYTHING, "everything"}
    if config.remat_policy == "custom":
        own = set(config.custom_device_tensors)
        return own | {tensor for tensor in EVERYTHING if config[tensor] == "device"} - {"mlpwo"}
    return set(KEPT.get(config.remat_policy, ())) - {"mlpwo"}


def _offload(config: Config) -> Iterator[Candidate]:
    moves = "moves between device and host at every step"
    if _kept(config) >= set(PROJECTIONS) - {"mlpwi", "mlpwo"} and config.remat_policy not in OFFLOADED:
        yield {"remat_policy": "minimal_offloaded"}, f"everything saved by remat_policy=minimal {moves}", False
    choices = {key: config[key] for key in ("decoder_layer_input", *EVERYTHING)}
    if "decoder_layer_input" not in offloaded(config.remat_policy, choices):
        changes = {"remat_policy": "custom", "decoder_layer_input": "offload"}
        if config.remat_policy != "custom":
            changes |= dict.fromkeys(EVERYTHING, "remat")
            changes = {key: value for key, value in changes.items() if value != "remat" or config[key] != "remat"}
        yield changes, f"each block is recomputed, and its input {moves}", False
    if not config.get("optimizer_memory_host_offload", True):
        yield {"optimizer_memory_host_offload": True}, f"the optimizer state {moves}", True
    if not config.get("parameter_memory_host_offload", True):
        yield {"parameter_memory_host_offload": True}, f"the stored copy of the parameters {moves}", True


def _shard(config: Config) -> Iterator[Candidate]:
    data, fsdp = config.ici_data_parallelism, config.ici_fsdp_parallelism
    if not config.get("shard_optimizer_over_data", True) and (data > 1 or config.get("dcn_data_parallelism", 1) > 1):
        yield {"shard_optimizer_over_data": True}, "parameters are all-gathered once after each update", True
    if data > 1:
        changes = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": data * fsdp}
        yield changes, "each layer's parameters are all-gathered from more devices", True
    topology = re.fullmatch(r"(\w+)-(\d+)", config.get("compile_topology", ""))
    if topology and topology[1] in GPUS and int(topology[2]) == GPUS_OF_HOST[-1]:
        hosts = 2 * config.compile_topology_num_slices
        more = {"compile_topology_num_slices": hosts, "dcn_fsdp_parallelism": 2 * config.dcn_fsdp_parallelism}
        yield more, "twice the hosts", True
    elif topology:
        larger = {"compile_topology": f"{topology[1]}-{2 * int(topology[2])}", "ici_fsdp_parallelism": 2 * fsdp}
        yield larger, "twice the devices", True


def _less(config: Config) -> Iterator[Candidate]:
    half = config.per_device_batch_size / 2
    rows = int(half) if half == int(half) else half
    steps = config.gradient_accumulation_steps
    changes = {"per_device_batch_size": rows, "gradient_accumulation_steps": 2 * steps}
    sums = "" if steps > 1 else ", and gradients are accumulated in float32"
    yield changes, f"the same global batch; parameters are all-gathered twice as often{sums}", False
    yield {"per_device_batch_size": rows}, "half the tokens per step", False
    if has_first_moment(config) and config.mu_dtype == "float32":
        yield {"mu_dtype": "bfloat16"}, "a first moment with 8 bits of precision", True
    if config.weight_dtype == "float32":
        yield {"weight_dtype": "bfloat16"}, "parameters with 8 bits of precision: small updates are lost", True
    yield {"max_target_length": config.max_target_length // 2}, "half the context length", False
