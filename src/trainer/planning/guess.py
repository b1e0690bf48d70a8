"""A quick guess of a step's time and memory, which orders the compilations but never excludes a point."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.aot.chips import Chip
from trainer.config.capabilities.expert_keys import has_experts
from trainer.config.derived import DCN, ICI, MESH_AXES
from trainer.config.keys import Config
from trainer.layers.remat import KEPT
from trainer.models.flops import flops_per_token, matmul_parameters

# For each policy that offloads tensors, the policy that keeps the same tensors on the device.
_OFFLOADS = {"qkv_proj_offloaded": "save_qkv_proj", "minimal_offloaded": "minimal"}
_EXPOSED = 0.5  # the share of transfers that computation does not hide
_BYTES = 2  # per entry of an activation or weight


class Guess(NamedTuple):
    """A step's time in seconds, and the memory in bytes that the step uses on a device."""

    seconds: float
    memory: float

    def times(self, factors: "Guess") -> "Guess":
        """Returns this guess with each figure multiplied by the same figure of `factors`."""
        return Guess(self.seconds * factors.seconds, self.memory * factors.memory)


class Guesses:
    """Guesses for the points of one plan, with corrections from the compiled results of similar points."""

    def __init__(self, config: Config, chip: Chip, devices: int):
        """`config`: the plan's configuration, with all sizes of the model. `devices`: the number of devices."""
        self._values, self._chip, self._devices = dict(config.items()), chip, devices
        self._flops, self._parameters = flops_per_token(config), _parameters(config)
        self._widths = {policy: _widths(config, policy) for policy in (*KEPT, "none", "custom")}
        self._routed = config.num_experts_per_tok if has_experts(config) else 0
        self._factors: dict[str, Guess] = {}  # for each group: the compiler's figures divided by the guesses

    def factors(self, changes: Mapping[str, Any]) -> Guess:
        """Returns the factors that correct the guess for a point, from the most similar compiled points."""
        return next((self._factors[group] for group in _groups(changes) if group in self._factors), Guess(1.0, 1.0))

    def learn(self, changes: Mapping[str, Any], seconds: float | None, memory: float) -> None:
        """Corrects future guesses for points similar to `changes`, given the compiler's figures for `changes`."""
        rough = self.of(changes)
        for group in _groups(changes):
            before = self._factors.get(group)
            known = before.seconds if before else 1.0
            new = Guess(seconds / rough.seconds if seconds else known, memory / rough.memory)
            self._factors[group] = Guess(*(math.sqrt(a * b) for a, b in zip(new, before or new, strict=True)))

    def of(self, changes: Mapping[str, Any]) -> Guess:
        """Returns the uncorrected guess for a point."""
        values = {**self._values, **changes}
        inside = {axis: abs(values[ICI[axis]]) for axis in MESH_AXES}
        size = {axis: inside[axis] * abs(values[DCN[axis]]) for axis in MESH_AXES}
        steps, policy = values["gradient_accumulation_steps"], values["remat_policy"]
        layers = values["base_num_decoder_layers"] / size["stage"]
        tokens = values["per_device_batch_size"] * self._devices * values["max_target_length"]
        local = tokens / (size["data"] * size["fsdp"] * size["expert"] * size["context"])  # tokens on a device
        sharded, gathered = size["tensor"] * size["stage"] * size["expert"], size["fsdp"] * size["context"]
        weights = _BYTES * self._parameters / sharded  # bytes on a device after the all-gather
        saved = sum(self._widths[_OFFLOADS.get(policy, policy)]) * local * layers * _BYTES / size["tensor"]
        every = sum(self._widths["none"]) * local * layers * _BYTES / size["tensor"]

        again = 1 + self._recomputed(policy) / 3
        compute = steps * tokens * self._flops * again / (self._devices * self._chip.flops("bf16"))
        if size["stage"] > 1:
            parts = max(values["num_pipeline_microbatches"], size["stage"])
            compute *= (parts + size["stage"] - 1) / parts
        sent = self._sent(values, size, local, weights / gathered)
        network = sum(self._transfer(bytes_, inside[axis], size[axis]) for axis, bytes_ in sent.items())
        zero1 = size["data"] if values["shard_optimizer_over_data"] else 1
        parameters = 4 * self._parameters / (sharded * gathered * zero1)
        optimizer = 2 * parameters
        on_host = (
            parameters * values["parameter_memory_host_offload"] + optimizer * values["optimizer_memory_host_offload"]
        )
        moved = 2 * on_host + (2 * steps * saved if policy in _OFFLOADS else 0)
        traffic = steps * (3 * weights + 5 * every) + 2 * (parameters + optimizer)
        tiles = 8 if values["num_vocab_tiling"] == -1 else values["num_vocab_tiling"]
        # Host offload hardly lowers the peak: the update needs the offloaded arrays, and compilers fetch them early.
        memory = parameters + optimizer + 4 * self._parameters / (sharded * gathered) + 2 * weights / max(layers, 1)
        memory += (0 if policy in _OFFLOADS else saved) + local * values["vocab_size"] * 4 / (tiles * size["tensor"])
        longest = max(compute, traffic / self._chip.hbm_bandwidth * self._chip.devices)
        return Guess(longest + _EXPOSED * (network + moved / self._chip.host_bandwidth * self._chip.devices), memory)

    def _sent(self, values: Mapping[str, Any], size: Mapping[str, int], local: float, shard: float) -> dict[str, float]:
        """Returns the bytes that a device sends in a step, by mesh axis.

        `local`: the number of tokens of a microbatch on the device. `shard`: the bytes of the device's shard of the
        weights.
        """
        steps, heads = values["gradient_accumulation_steps"], values["base_num_kv_heads"] * values["head_dim"]
        layers = values["base_num_decoder_layers"] / size["stage"]
        activations = steps * layers * local * _BYTES
        width = values["base_emb_dim"]
        return {
            "fsdp": 3 * steps * shard * (size["fsdp"] - 1),
            "data": 2 * shard * (size["data"] - 1) / size["data"],
            "tensor": 8 * activations * width * (size["tensor"] - 1) / size["tensor"],
            "context": (3 * steps * shard + 6 * activations * heads) * (size["context"] - 1),
            "expert": 4 * activations * self._routed * width * (size["expert"] - 1) / size["expert"],
            "stage": 4 * steps * local * width * _BYTES * (size["stage"] > 1),
        }

    def _transfer(self, sent: float, inside: int, size: int) -> float:
        bandwidth = self._chip.ici_bandwidth / (1 if size == self._devices else self._chip.torus)
        between = sent / inside / self._chip.dcn_bandwidth if size > inside else 0.0
        return (sent / bandwidth + between) * self._chip.devices

    def _recomputed(self, policy: str) -> float:
        """Returns the share of the forward pass that a policy recomputes, from the widths of the kept tensors."""
        every, kept = self._widths["minimal_with_context"], self._widths[_OFFLOADS.get(policy, policy)]
        return 0.0 if policy == "none" else max(0.0, 1 - (sum(kept) - kept[0]) / (sum(every) - every[0]))


def _groups(changes: Mapping[str, Any]) -> list[str]:
    """Returns the names of the groups that contain a point, from the smallest group to the group of all points."""
    rows = ("per_device_batch_size", "gradient_accumulation_steps")
    alike = {key: value for key, value in changes.items() if key not in rows}
    mesh = {key: value for key, value in alike.items() if key.endswith("_parallelism")}
    policy = {**mesh, "remat_policy": changes.get("remat_policy")}
    return [str(sorted(group.items())) for group in (alike, policy, mesh, {})]


def _parameters(config: Config) -> float:
    """Returns the approximate number of parameters, including all experts."""
    count = float(matmul_parameters(config))
    if has_experts(config):
        expert = (len(config.mlp_activations) + 1) * config.base_emb_dim * config.base_moe_mlp_dim
        count += config.base_num_decoder_layers * (config.num_experts - config.num_experts_per_tok) * expert
    return count


def _widths(config: Config, policy: str) -> list[int]:
    """Returns the number of entries per token and layer of each tensor that a policy keeps, the block's input first."""
    heads, kv = (count * config.head_dim for count in (config.base_num_query_heads, config.base_num_kv_heads))
    hidden = config.base_moe_mlp_dim * config.num_experts_per_tok if has_experts(config) else config.base_mlp_dim
    widths = {"query_proj": heads, "key_proj": kv, "value_proj": kv, "context": heads, "out_proj": config.base_emb_dim}
    widths |= {"mlpwi_0": hidden, "mlpwi_1": hidden}
    if policy == "none":
        return [config.base_emb_dim, *widths.values(), *widths.values()]
    return [config.base_emb_dim, *(widths.get(tensor, 0) for tensor in KEPT.get(policy, ()))]
