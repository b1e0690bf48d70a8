"""Writes Hugging Face's format: config.json and safetensors, tensor by tensor."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from trainer.config.keys import Config
from trainer.leaves.about import About
from trainer.leaves.source import Leaf, Tick, names_of, nested, progress
from trainer.models.families import Place, places_of
from trainer.models.huggingface import Layout
from trainer.weights.huggingface.compressed_tensors import quantization_config
from trainer.weights.huggingface.config_json import config_json
from trainer.weights.huggingface.like import Like
from trainer.weights.huggingface.quantized_kernels import arrays_out, scheme_out, tensors_out
from trainer.weights.huggingface.read import CONFIG, head_to_reorder, layouts_of, tensors_of
from trainer.weights.huggingface.safetensors_file import SafetensorsFile, Tensors
from trainer.weights.huggingface.weight_files import INDEX, SINGLE
from trainer.weights.params.write import target_dtypes
from trainer.weights.stored import stored_kernels

SHARD_BYTES = 4_000_000_000
_TIED_HEAD = ("lm_head.weight",)  # a tied head is a linear layer, too


def write_huggingface(
    folder: Path,
    config: Config,
    leaves: Mapping[str, Leaf],
    dtype: str | None,
    about: About = About(),  # noqa: B008 (immutable)
    shard_bytes: int = SHARD_BYTES,
    like: Like | None = None,
) -> None:
    """Writes config.json and the tensors of `leaves` into `folder`, which must exist and be empty. Weights that are
    stored quantized are written in the layout of compressed-tensors.

    Args:
      config: resolved.
      dtype: the dtype to cast to; None keeps the stored dtype of each tensor.
      about: whose fields are written into config.json.
      shard_bytes: the maximum bytes of tensors per file. A larger tensor gets a file for itself.
      like: the directory whose other tensors and config.json are written, too. `leaves` are no quantized weights.

    Raises:
      UserError: quantized weights have no such layout; config.json or the family's Layouts cannot represent the
        model; or see `target_dtypes`.
    """
    kernels = stored_kernels(config)
    parts = names_of(nested(kernels))
    shapes = {name: leaf.shape for name, leaf in leaves.items() if name not in parts}
    shapes |= {name: kernel.shape if hasattr(kernel, "shape") else () for name, kernel in kernels.items()}
    places = places_of(config, shapes)
    layouts = layouts_of(config, places)
    if like:
        layouts = {name: layout._replace(name=like.here(layout.name)) for name, layout in layouts.items()}
    dtypes = target_dtypes({name: leaf for name, leaf in leaves.items() if name not in parts}, dtype)
    data = like.config(about) if like else config_json(config, dtypes["token_embedder/embedding"].name, about.fields)

    schemes = {name: scheme_out(name, it, layouts[name], places[name] is not None) for name, it in kernels.items()}
    names = {name: [it for it, _ in tensors_of(layouts[name], places[name], shape)] for name, shape in shapes.items()}
    become = {name: tensors_out(names[name], *schemes[name]) for name in kernels}
    for name in dtypes:
        tensors = tensors_of(layouts[name], places[name], shapes[name])
        become[name] = [{tensor: (shape, dtypes[name])} for tensor, shape in tensors]
    if kernels:
        quantized = {tensor: scheme for name, (scheme, _) in schemes.items() for tensor in names[name]}
        linear = [*(tensor for name in dtypes if layouts[name].inputs for tensor in names[name]), *_TIED_HEAD]
        others = [tensor for tensor in dict.fromkeys(linear) if tensor not in quantized]
        data["quantization_config"] = quantization_config(quantized, others)
    (folder / CONFIG).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    ordered = _in_order({name: (places[name], become[name]) for name in shapes})
    copied = like.others if like else {}
    shards = _shards(ordered | (like.shapes if like else {}), shard_bytes)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(SafetensorsFile(folder / name, part)) for name, part in shards.items()}
        file_of = {tensor: files[name] for name, tensors in shards.items() for tensor in tensors}
        tick = stack.enter_context(progress(leaves.values(), "writing"))
        for name, shape in shapes.items():
            head = head_to_reorder(config, layouts[name], shape)
            if name in kernels:
                own = {part.rpartition("/")[2]: leaves[part] for part in names_of(nested({name: kernels[name]}))}
                how = schemes[name][0], layouts[name], places[name] is not None, head, tick
                for tensor, value in arrays_out(names[name], own, *how):
                    file_of[tensor].write(tensor, value)
            else:
                targets = [(file_of[tensor], tensor) for tensor in names[name]]
                _write_leaf(leaves[name], layouts[name], dtypes[name], head, targets, tick)
        for tensor, stored in copied.items():
            file_of[tensor].copy(tensor, stored)
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


def _in_order(kinds: Mapping[str, tuple[Place | None, Sequence[Tensors]]]) -> Tensors:
    """Returns all tensors in the order of the forward pass, so that a shard has complete layers."""
    placed = []
    for name, (where, matrices) in kinds.items():
        part = 1 if where else 0 if name.startswith("token_embedder/") else 2
        layers = where.layers if where else [0]
        for i, tensors in enumerate(matrices):
            layer = layers[i * len(layers) // len(matrices)]
            placed += [(part, layer, tensor, *it) for tensor, it in tensors.items()]
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
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_index(path: Path, shards: Mapping[str, Tensors]) -> None:
    total = sum(int(np.prod(shape)) * dtype.itemsize for group in shards.values() for shape, dtype in group.values())
    weight_map = {tensor: name for name, group in shards.items() for tensor in group}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
