"""Writes Hugging Face's format: config.json and safetensors, tensor by tensor."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint.huggingface import CONFIG, INDEX, head_to_reorder, layouts_of, tensors_of
from trainer.checkpoint.params_out import target_dtypes
from trainer.checkpoint.safetensors_file import SafetensorsFile, Tensors
from trainer.checkpoint.source import Leaf, Tick, progress
from trainer.config import Config
from trainer.models.families import Place, place, stacks
from trainer.models.huggingface import Layout
from trainer.models.huggingface_config import config_json

SHARD_BYTES = 4_000_000_000


def write_huggingface(
    folder: Path,
    config: Config,
    leaves: Mapping[str, Leaf],
    dtype: str | None,
    neutral: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json and the tensors of `leaves` into `folder`, which must exist and be empty.

    Args:
      config: resolved.
      dtype: the dtype to cast to; None keeps the stored dtype of each tensor.
      neutral: see `config_json`.
      shard_bytes: the maximum bytes of tensors per file. A larger tensor gets a file for itself.

    Raises:
      UserError: config.json or the family's Layouts cannot represent the model; or see `target_dtypes`.
    """
    places = {name: place(stacks(config), name) for name in leaves}
    layouts = layouts_of(config, places)
    dtypes = target_dtypes(leaves, dtype)
    data = config_json(config, dtypes["token_embedder/embedding"].name, neutral)
    (folder / CONFIG).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    names = {name: tensors_of(layouts[name], places[name], leaf.shape) for name, leaf in leaves.items()}
    shards = _shards(_in_order({name: (places[name], names[name], dtypes[name]) for name in leaves}), shard_bytes)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(SafetensorsFile(folder / name, part)) for name, part in shards.items()}
        file_of = {tensor: files[name] for name, tensors in shards.items() for tensor in tensors}
        tick = stack.enter_context(progress(leaves.values(), "writing"))
        for name, leaf in leaves.items():
            targets = [(file_of[tensor], tensor) for tensor, _ in names[name]]
            head = head_to_reorder(config, layouts[name], leaf.shape)
            _write_leaf(leaf, layouts[name], dtypes[name], head, targets, tick)
    if len(shards) > 1:
        _write_index(folder / INDEX, shards)


def _write_leaf(
    leaf: Leaf,
    layout: Layout,
    dtype: np.dtype,
    head: int,
    targets: Sequence[tuple[SafetensorsFile, str]],
    tick: Tick,
) -> None:
    """Writes the tensors of one leaf, layer by layer, to the files and names in `targets`."""
    layers = leaf.layers(tick) if "{}" in layout.name else [leaf.read(leaf.dtype, tick)]
    values = (value for layer in layers for value in (layer if layout.of_experts else [layer]))
    for (file, tensor), value in zip(targets, values, strict=True):
        file.write(tensor, layout.to_theirs(value, head).astype(dtype, copy=False))


def _in_order(kinds: Mapping[str, tuple[Place | None, list[tuple[str, tuple[int, ...]]], np.dtype]]) -> Tensors:
    """Returns all tensors in the order of the forward pass, so that a shard has complete layers."""
    placed = []
    for name, (where, tensors, dtype) in kinds.items():
        part = 1 if where else 0 if name.startswith("token_embedder/") else 2
        layers = where.layers if where else [0]
        for i, (tensor, shape) in enumerate(tensors):
            placed.append((part, layers[i * len(layers) // len(tensors)], tensor, shape, dtype))
    return {tensor: (shape, dtype) for _, _, tensor, shape, dtype in sorted(placed, key=lambda it: it[:2])}


def _shards(tensors: Tensors, shard_bytes: int) -> dict[str, Tensors]:
    groups: list[Tensors] = [{}]
    size = 0
    for name, (shape, dtype) in tensors.items():
        nbytes = int(np.prod(shape)) * dtype.itemsize
        if groups[-1] and size + nbytes > shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = (shape, dtype)
        size += nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_index(path: Path, shards: Mapping[str, Tensors]) -> None:
    total = sum(int(np.prod(shape)) * dtype.itemsize for group in shards.values() for shape, dtype in group.values())
    weight_map = {tensor: name for name, group in shards.items() for tensor in group}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
