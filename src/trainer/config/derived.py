"""Values derived from a resolved configuration."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config.keys import Config

# The mesh axes, the outermost first.
MESH_AXES = (
    "diloco",
    "data",
    "stage",
    "fsdp",
    "fsdp_transpose",
    "context",
    "context_usp_ulysses",
    "context_autoregressive",
    "tensor",
    "tensor_sequence",
    "expert",
    "autoregressive",
)
# The mesh axes that shard parameters only to save memory: parameters are all-gathered over them before a product.
FSDP = ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses")
# The keys for the size of each axis, within a slice (ICI) and across slices (DCN).
ICI = {axis: f"ici_{'pipeline' if axis == 'stage' else axis}_parallelism" for axis in MESH_AXES}
DCN = {axis: f"dcn_{'pipeline' if axis == 'stage' else axis}_parallelism" for axis in MESH_AXES}
# The axes that no feature uses yet, each with the reason.
UNUSED_AXES = {
    "context_autoregressive": "context parallelism for inference is not supported yet",
    "autoregressive": "nothing uses this axis; trainer.generate uses data, fsdp and tensor",
}

# If one of these keys is empty or 0, its value is derived from other keys.
FOLLOWS: Mapping[str, Callable[[Config], Any]] = {
    "mu_dtype": lambda given: given.weight_dtype,
    # An evaluation batch has as many rows as an update, so evaluation does not depend on the split into microbatches.
    "eval_per_device_batch_size": lambda given: given.per_device_batch_size * given.gradient_accumulation_steps,
}


def mesh_axes(config: Config) -> dict[str, int]:
    """Returns the sizes of the mesh axes over all slices, the outermost first."""
    return {axis: config[ICI[axis]] * config[DCN[axis]] for axis in MESH_AXES}


def islands(config: Config) -> int:
    """Returns the number of DiLoCo's islands; 1 without DiLoCo."""
    return mesh_axes(config)["diloco"]


def microbatch_rows(config: Config) -> int:
    """Returns the number of rows of one microbatch over all devices."""
    return round(config.per_device_batch_size * math.prod(mesh_axes(config).values()))


def global_batch_rows(config: Config) -> int:
    """Returns the number of rows of one update over all devices."""
    return microbatch_rows(config) * config.gradient_accumulation_steps


def eval_batch_rows(config: Config) -> int:
    """Returns the number of rows of one evaluation batch over all devices."""
    return round(config.eval_per_device_batch_size * math.prod(mesh_axes(config).values()))


def eval_parts(config: Config) -> int:
    """Returns the number of parts, each as large as a microbatch, into which an evaluation batch is split. Returns 1 if
    the batch cannot be split into such parts."""
    parts, left = divmod(eval_batch_rows(config), microbatch_rows(config))
    return parts if parts and not left else 1


def row_for(tokens: int) -> int:
    """Returns the length of a row for `tokens` tokens: `tokens` rounded up to a multiple of 128."""
    return -(-tokens // 128) * 128


def has_reference(config: Config) -> bool:
    """Returns whether the objective uses the run's initial parameters as a reference model."""
    compared = config.use_dpo and config.dpo_algo == "dpo"
    return bool(compared or (config.use_grpo and config.rl_grpo_beta))


def has_dropout(config: Config) -> bool:
    """Returns whether updates use dropout."""
    return bool(config.enable_dropout and (config.dropout_rate or config.attention_dropout_rate))


def has_rollouts(config: Config) -> bool:
    """Returns whether a run trains on texts that its model generates (see `trainer.rl.rounds`)."""
    return bool(config.use_grpo or (config.use_distill and config.distill_rollouts))


def samples_divergence(config: Config) -> bool:
    """Returns whether distillation estimates its divergence from the log-probabilities of rollouts."""
    return bool(config.distill_loss == "sampled_reverse_kl")


def rollouts_share(config: Config) -> float:
    """Returns the share of rounds with texts that the model generates; the other rounds use texts from the data."""
    return config.distill_rollouts_share if config.use_distill else 1.0


def completions_per_prompt(config: Config) -> int:
    """Returns the number of completions for each prompt of a round."""
    return config.rl_num_generations if config.use_grpo else 1


def policy_temperature(config: Config) -> float:
    """Returns the temperature for log-probabilities in generation: the sampling temperature with rollouts, else 1."""
    return float(config.decode_sampling_temperature) if has_rollouts(config) else 1.0
