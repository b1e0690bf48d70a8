"""The summary printed at the start of a run: devices, model, batch, data."""

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.config.capabilities.diloco_keys import timetable
from trainer.config.capabilities.documents import most_documents
from trainer.config.capabilities.expert_keys import dense_layers, has_experts, some_experts
from trainer.config.capabilities.kernels import KERNELS, Capability, read_documents, why_no_kernel
from trainer.config.capabilities.latent_keys import is_latent
from trainer.config.capabilities.sparsity_keys import is_sparse
from trainer.config.capabilities.windows import has_window, in_chunks, windows
from trainer.config.derived import DCN, global_batch_rows, islands, mesh_axes
from trainer.config.family import reads
from trainer.config.flags import combination
from trainer.config.keys import Config
from trainer.config.words import counted
from trainer.observe.lines import Work
from trainer.observe.text import clock, short_time, si


def work_of(config: Config, flops_per_token: float, peak: float | None = None) -> Work:
    """Returns the work of one step of the resolved `config`. See `Work` for the arguments."""
    tokens = global_batch_rows(config) * config.max_target_length
    return Work(math.prod(mesh_axes(config).values()), tokens, flops_per_token, peak)


class Needs(NamedTuple):
    """The memory that the compiled step needs on one device, in bytes."""

    peak: int
    arguments: int  # for the train state and the batch
    temporaries: int
    available: float | None  # the device's memory; None if the device does not report it


def needs_rows(work: Work, needs: Needs | None, steps_left: int) -> list[tuple[str, str]]:
    """Returns (label, text) rows: the memory and FLOPs of a step, and the minimum time of the `steps_left` remaining
    steps."""
    found = []
    if needs is not None:
        of = f" of {si(needs.available, 'B')}" if needs.available else ""
        parts = f"state and batch {si(needs.arguments, 'B')}, temporaries {si(needs.temporaries, 'B')}"
        found.append(("memory", f"{si(needs.peak, 'B')}{of} per device: {parts}"))
    per_step = si(work.flops_per_token * work.tokens, "FLOP")
    found.append(("FLOPs", f"{si(work.flops_per_token, 'FLOP')} per token, {per_step} per step (model FLOPs)"))
    if work.peak:
        seconds = work.flops_per_token * work.tokens / work.devices / work.peak
        at = f"{short_time(seconds)} per step at the peak of {si(work.peak, 'FLOP/s')} per device"
        found.append(("time", f"at least {clock(seconds * steps_left)} for {counted(steps_left, 'step')}: {at}"))
    return found


def banner_rows(
    config: Config,
    *,
    device_kind: str,
    platform: str,
    capability: Capability | None = None,
    process_count: int,
    parameters: int,
    dataset: str,
    run_dir: Path,
    trained: int | None = None,
    passes: str = "",
    products: Sequence[tuple[str, str]] = (),
    pipeline: str = "",
    teacher: str = "",
) -> list[tuple[str, str]]:
    """Returns (label, text) rows for the resolved `config`.

    Args:
      device_kind, platform: the mesh devices' kind and platform, as reported by JAX.
      capability: see `config.resolve`.
      parameters: the number of the model's parameters.
      trained: the number of these parameters that are trained; None: all.
      dataset: one line about the data.
      passes: the text after the number of steps (`training.passes_text`).
      products: the rows about quantized, sparse and adapted matrices, from `product_rows`.
      pipeline: a description of the pipeline's stages; "" without a pipeline.
      teacher: a description of the teacher; "" without one.
    """
    rows, length, tokens = global_batch_rows(config), config.max_target_length, work_of(config, 0.0).tokens
    reason = why_no_kernel(config, mesh_axes(config), platform, capability) or _bias(config, capability)
    batch = f"{counted(rows, 'row')} x {counted(length, 'token')} = {counted(tokens, 'position')} per step"
    if config.gradient_accumulation_steps > 1:
        batch += f", in {config.gradient_accumulation_steps} microbatches"
    some = trained not in (None, parameters)
    return [
        ("devices", devices_text(config, device_kind, platform, process_count)),
        ("mesh", mesh_text(config)),
        *([("pipeline", pipeline)] if pipeline else []),
        ("combination", combination(config)),
        ("model", model_text(config, parameters) + (f", {trained:,} of them trained" if some else "")),
        *([("teacher", teacher)] if teacher else []),
        ("attention", config.attention + _windows(config) + (f" ({reason})" if reason else "")),
        ("dtype", f"{config.dtype}, weights {config.weight_dtype}"),
        *products,
        ("batch", batch),
        *([("loss", f"in {config.num_vocab_tiling} tiles of tokens")] if config.num_vocab_tiling > 1 else []),
        ("steps", f"{config.steps:,}{passes}"),
        *([("islands", _islands(config))] if config.enable_diloco else []),
        ("data", dataset),
        ("run", str(run_dir)),
    ]


def model_text(config: Config, parameters: int) -> str:
    """Returns a line with the sizes of a model. `parameters`: the number of its parameters."""
    return (
        f"{config.decoder_block}: {counted(config.base_num_decoder_layers, 'layer')}, "
        f"width {config.base_emb_dim}, {_heads(config)}, "
        f"{_feed_forward(config)}, vocabulary {config.vocab_size}, "
        f"{'tied' if config.logits_via_embedding else 'separate'} head; {parameters:,} parameters"
    )


def product_rows(
    config: Config, quantized: Iterable[str], left: Iterable[str], masked: Iterable[str], adapted: Iterable[str]
) -> list[tuple[str, str]]:
    """Returns (label, text) rows that list matrices.

    Args:
      quantized: the canonical names of the quantized matrices.
      left: the canonical names of the matrices that stay in floating point.
      masked: the canonical names of the matrices with sparsity masks.
      adapted: the canonical names of the matrices with adapters.
    """
    rows = []
    if config.enable_lora:
        base = f", over {config.lora_weight_qtype}" if config.lora_weight_qtype else ""
        how = f"rank {config.lora_rank}, scale {config.lora_alpha / config.lora_rank:g}{base}"
        rows += [("adapters", f"{how}: {_by_stack(adapted)}")]
    if config.quantization:
        rows += [("quantized", f"{config.quantization}: {_by_stack(quantized)}")]
        rows += [("float", _by_stack(left) or "no matrix")]
    if is_sparse(config):
        rows += [
            (
                "sparse",
                f"{config.weight_sparsity_n} of {config.weight_sparsity_m} inputs, from step "
                f"{config.weight_sparsity_start_step}: {_by_stack(masked)}",
            )
        ]
    return rows


def _by_stack(names: Iterable[str]) -> str:
    """Returns the names, grouped by their first two path components: "decoder/layers (mlp/wi_0, mlp/wo)"."""
    parts = [name.removesuffix("/kernel").split("/") for name in names]
    found = []
    for first, group in itertools.groupby(sorted(parts), lambda path: path[:2]):
        below = ["/".join(path[2:]) for path in group]
        found.append("/".join(first) + (f" ({', '.join(below)})" if any(below) else ""))
    return ", ".join(found)


def _islands(config: Config) -> str:
    return (
        f"{islands(config)}, which synchronize {timetable(config)}; evaluation uses the outer parameters of the last "
        "synchronization"
    )


def devices_text(config: Config, device_kind: str, platform: str, process_count: int) -> str:
    """Returns a description of the devices, such as "8 x cpu, 1 process". See `banner_rows` for the arguments."""
    kind = device_kind if device_kind.lower() == platform else f"{device_kind} ({platform})"
    return f"{math.prod(mesh_axes(config).values())} x {kind}, {counted(process_count, 'process', 'processes')}"


def mesh_text(config: Config) -> str:
    """Returns the sizes of the mesh axes larger than 1, and over how many slices each axis extends, as a text."""

    def product(sizes: dict[str, int]) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)

    slices = product({axis: config[key] for axis, key in DCN.items()})
    return (product(mesh_axes(config)) or "one device") + (f" (slices: {slices})" if slices else "")


def _heads(config: Config) -> str:
    heads = config.base_num_query_heads
    if is_latent(config):
        ranks = f"key-value latent {config.kv_lora_rank}" + (
            f", query latent {config.q_lora_rank}" if config.q_lora_rank else ""
        )
        parts = f"query-key {config.qk_nope_head_dim} + {config.qk_rope_head_dim}, value {config.v_head_dim}"
        return f"{heads} heads ({parts}; {ranks})"
    return f"{heads} heads of {config.head_dim} ({config.base_num_kv_heads} key-value)"


def _windows(config: Config) -> str:
    if not has_window(config):
        return ""
    every = len(windows(config))
    whole = f"; 1 layer in {every} attends to the whole document" if 1 < every <= config.base_num_decoder_layers else ""
    what = "chunks" if in_chunks(config) else "sliding window"
    return f", {what} of {counted(windows(config)[0], 'token')}{whole}"


def _bias(config: Config, capability: Capability | None) -> str:
    """Returns a note on the additional cost of attention if documents share rows and the attention kernel needs a bias
    to separate the documents, because it does not get their lengths; "" if there is no such cost.

    All layers and heads can share one bias, but each layer and each head reads it twice.
    """
    kernel, length = KERNELS[config.attention].on(capability), config.max_target_length
    if kernel.documents == 0 or read_documents(config, capability) is not None:
        return ""
    bounded = "; max_segments_per_seq=N bounds the documents of a row" if kernel.documents is None else ""
    cost = f"a bias of {si(2.0 * length * length, 'B').strip()} for a row, and no scores are skipped"
    return f"documents share rows: {cost}{'' if most_documents(config) else bounded}"


def _feed_forward(config: Config) -> str:
    if not has_experts(config):
        return f"MLP {config.base_mlp_dim}"
    experts = f"{config.num_experts} experts of {config.base_moe_mlp_dim} ({config.num_experts_per_tok} per token"
    if reads(config, "shared_experts"):
        experts += f", and {config.shared_experts} shared"
    dense = dense_layers(config) if some_experts(config) else 0
    return f"{experts}), MLP {config.base_mlp_dim} in {counted(dense, 'layer')}" if dense else f"{experts})"
