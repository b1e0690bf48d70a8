"""Bounds on products of sizes: rejects configurations that are too large for any program, before tracing."""

import math

from trainer.config.capabilities.optimizers import moment_bytes
from trainer.config.derived import islands, mesh_axes
from trainer.config.keys import Config
from trainer.config.rules import with_lengths
from trainer.config.schema import INT32_MAX
from trainer.config.tensors import dimension, tensors_of

# The maximum number of elements of one array, over all devices. Published models have up to 2^38 elements, and XLA
# supports less than 2^63 bytes.
MAX_ENTRIES = 2**46
BYTES = {"float32": 4, "bfloat16": 2}
_BYTES_OF_TOKEN = 5 * 4  # five int32 arrays [rows, length], which every objective's batch has


def too_large(values: Config) -> list[str]:
    """Returns one line for each product of sizes in `values` that exceeds a bound. The mesh must be filled in."""
    return [*_too_many_tokens(values), *_too_many_entries(values)]


def least_bytes(config: Config) -> int:
    """Returns a lower bound on the memory that training needs on all devices together, in bytes.

    Counts parameters, optimizer state, the batch of an update and the hidden states of one microbatch, as if nothing
    were replicated. Does not count host memory, and tensors that `tensors_of` does not return.

    Args:
      config: a resolved configuration.
    """
    parameters = sum(math.prod(_lengths(config, names)) for names in _parameters(config).values())
    each = 0 if config.parameter_memory_host_offload else BYTES[config.weight_dtype]
    if not config.trainable_parameters_mask and not config.optimizer_memory_host_offload:
        each += moment_bytes(config, BYTES) + (BYTES["float32"] if config.ema_decay else 0)
    each *= islands(config)
    if config.enable_diloco:
        each += BYTES["float32"] * (2 if config.diloco_outer_momentum else 1)
    tokens = _microbatch_rows(config) * config.max_target_length
    batch = tokens * config.gradient_accumulation_steps * _BYTES_OF_TOKEN
    return parameters * each + batch + tokens * config.base_emb_dim * BYTES[config.dtype]


def _too_many_tokens(values: Config) -> list[str]:
    length, devices = values.max_target_length, math.prod(mesh_axes(values).values())
    parts = {"per_device_batch_size": "an update", "eval_per_device_batch_size": "an evaluation batch"}
    lines = []
    for key, what in parts.items():
        if what != "an update" and (values.eval_interval <= 0 or values[key] == values.per_device_batch_size):
            continue
        steps = values.gradient_accumulation_steps if what == "an update" else 1
        tokens = round(values[key] * devices) * steps * length
        if tokens > INT32_MAX:
            product = f"{values[key]:g} x {devices} devices{f' x {steps} microbatches' if steps > 1 else ''}"
            lines.append(
                f"{key}={values[key]:g}: {product} x {length} tokens = {tokens:.4g} tokens in {what}; the maximum is "
                f"{INT32_MAX}, a 32-bit count"
            )
    return lines


def _too_many_entries(values: Config) -> list[str]:
    arrays = dict(tensors_of(values))
    if "queries" in arrays and values.attention == "dot_product":
        scores = ("activation_batch", "activation_heads", "activation_q_length", "activation_kv_length")
        arrays["scores of attention=dot_product"] = scores
    lines = []
    for tensor, names in arrays.items():
        entries = math.prod(_lengths(values, names))
        if entries > MAX_ENTRIES:
            lines.append(
                f"{tensor} {with_lengths(names, values)}: {entries:.4g} elements, too large for any device or compiler"
            )
    return lines[:1]  # only one line, because other arrays of the same sizes would repeat it


def _parameters(values: Config) -> dict[str, tuple[str, ...]]:
    tensors = {name: axes for name, axes in tensors_of(values).items() if "/" in name}
    if values.logits_via_embedding:
        del tensors["decoder/logits_dense/kernel"]
    return tensors


def _lengths(values: Config, names: tuple[str, ...]) -> list[int]:
    return [
        _microbatch_rows(values) if name == "activation_batch" else values[dimension(name, values)] for name in names
    ]


def _microbatch_rows(values: Config) -> int:
    return round(values.per_device_batch_size * math.prod(mesh_axes(values).values()))
