"""Writes Hugging Face's format: config.json and safetensors, tensor by tensor."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config.keys import Config
from trainer.leaves.about import About
from trainer.leaves.source import Leaf, Tick, common_dtype, names_of, nested, progress
from trainer.models.families import Place, hugging_face, places_of
from trainer.models.huggingface import Layout, Merged
from trainer.weights.huggingface.compressed_tensors import arrays_of, quantization_config
from trainer.weights.huggingface.compressed_tensors import tensors_of as quantized_tensors
from trainer.weights.huggingface.config_json import config_json
from trainer.weights.huggingface.like import Like
from trainer.weights.huggingface.merged import scheme_of_whole, whole_of, whole_shapes, wholes
from trainer.weights.huggingface.quantization_config import Scheme
from trainer.weights.huggingface.quantized_kernels import codes_and_scales, scheme_out
from trainer.weights.huggingface.read import CONFIG, head_to_reorder, layouts_of, tensors_of
from trainer.weights.huggingface.safetensors_file import SafetensorsFile, Tensors
from trainer.weights.huggingface.weight_files import INDEX, SINGLE
from trainer.weights.params.write import target_dtypes
from trainer.weights.stored import stored_kernels

SHARD_BYTES = 4_000_000_000
_TIED_HEAD = ("lm_head.weight",)  # although it has no tensor, a tied head is a linear layer


def write_huggingface(
    folder: Path,
    config: Config,
    leaves: Mapping[str, Leaf],
    dtype: str | None,
    about: About = About(),  # noqa: B008 (immutable)
    shard_bytes: int = SHARD_BYTES,
    like: Like | None = None,
) -> None:
    """Writes config.json and the tensors of `leaves` into `folder`, which must exist and be empty. Quantized
    weights are written in the format of compressed-tensors.

    Args:
      config: resolved.
      dtype: the dtype to cast to; None keeps each tensor's stored dtype.
      about: provides further fields of config.json.
      shard_bytes: the maximum bytes of tensors per file. A larger tensor gets a separate file.
      like: a multimodal directory whose config.json and other tensors are written, too. It requires float `leaves`.

    Raises:
      UserError: compressed-tensors, config.json or the family's Layouts cannot represent the model; or the error of
        `target_dtypes`.
    """
    kernels = stored_kernels(config)
    parts = names_of(nested(kernels))
    shapes = {name: leaf.shape for name, leaf in leaves.items() if name not in parts}
    shapes |= {name: kernel.shape if hasattr(kernel, "shape") else () for name, kernel in kernels.items()}
    dtypes = target_dtypes({name: leaf for name, leaf in leaves.items() if name not in parts}, dtype)
    data = like.config(about) if like else config_json(config, dtypes["token_embedder/embedding"].name, about.fields)

    plan = _plan(config, shapes, kernels, dtypes)
    if like:
        plan = {like.here(name): it for name, it in plan.items()}
    if kernels:
        linear = [*(name for name, it in plan.items() if it.layouts[0].inputs), *_TIED_HEAD]
        quantized = {name: it.scheme for name, it in plan.items() if it.scheme is not None}
        others = [name for name in dict.fromkeys(linear) if name not in quantized]
        data["quantization_config"] = quantization_config(quantized, others)
    (folder / CONFIG).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    copied, more = (like.others, like.shapes) if like else ({}, {})
    shards = _shards(_in_order(plan) | more, shard_bytes)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(SafetensorsFile(folder / name, part)) for name, part in shards.items()}
        file_of = {tensor: files[name] for name, tensors in shards.items() for tensor in tensors}
        tick = stack.enter_context(progress(leaves.values(), "writing"))
        for names, targets in _by_parameters(plan).items():
            streams = [
                _stream(config, name, leaves, kernels, plan[targets[0]], i, tick) for i, name in enumerate(names)
            ]
            for target, parts in zip(targets, zip(*streams, strict=True), strict=True):
                for tensor, value in plan[target].arrays(target, parts).items():
                    file_of[tensor].write(tensor, value)
        for tensor, stored in copied.items():
            file_of[tensor].copy(tensor, stored)
    if len(shards) > 1:
        _write_index(folder / INDEX, shards)


class _Target(NamedTuple):
    """A tensor to write, in which several parameters may be merged.

    Attributes:
      names, layouts: the canonical names and the layouts of the tensor's parameters.
      where: the parameters' position in the stacks; None outside of the stacks.
      layer: the number of the tensor's layer; 0 outside of the stacks.
      shape, dtype: those of the tensor or, if it is quantized, those of the float matrix that it represents.
      scheme: how the tensor is quantized; None for floats.
      merged: how the tensor's parts are merged; None for a single part.
    """

    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    where: Place | None
    layer: int
    shape: tuple[int, ...]
    dtype: np.dtype
    scheme: Scheme | None
    merged: Merged | None

    def files(self, tensor: str) -> Tensors:
        """Returns the shapes and dtypes of the tensors that represent this target in the files, by name. `tensor`: the
        target's name."""
        if self.scheme is None:
            return {tensor: (self.shape, self.dtype)}
        out, into = self.shape
        return quantized_tensors(tensor, (out, into), self.scheme)

    def arrays(self, tensor: str, parts: Sequence[tuple[np.ndarray, ...]]) -> dict[str, np.ndarray]:
        """Returns the values of the tensors that `files` lists. `parts`: (value,) for each of the tensor's parts or, if
        the tensor is quantized, (codes, scales)."""
        whole = [self.merged.joined(each) if self.merged else each[0] for each in zip(*parts, strict=True)]
        return {tensor: whole[0]} if self.scheme is None else arrays_of(tensor, whole[0], whole[1], self.scheme)


def _plan(
    config: Config, shapes: Mapping[str, tuple[int, ...]], kernels: Mapping[str, Any], dtypes: Mapping[str, np.dtype]
) -> dict[str, _Target]:
    """Returns the tensors of the parameters in `shapes`, by name."""
    places, merged = places_of(config, shapes), hugging_face(config).merged
    layouts = layouts_of(config, places)
    schemes = {name: scheme_out(name, it, layouts[name], places[name] is not None) for name, it in kernels.items()}
    of, sizes = dict[str, tuple[str, int]](), dict[str, tuple[int, ...]]()
    for name, shape in shapes.items():
        tensors, where = tensors_of(layouts[name], places[name], shape), places[name]
        sizes |= tensors
        for i, (tensor, _) in enumerate(tensors):
            of[tensor] = name, where.layers[i * len(where.layers) // len(tensors)] if where else 0
    whole, plan = whole_shapes(sizes, merged), dict[str, _Target]()
    for tensor, parts in wholes(sizes, merged).items():
        names, layer = tuple(of[part][0] for part in parts), of[parts[0]][1]
        found = whole_of(parts[0], merged)
        how = found.how if found else None
        scheme = scheme_of_whole(
            tensor,
            [(schemes.get(name), sizes[part][0]) for name, part in zip(names, parts, strict=True)],
            how is None or how.groups == 1,
        )
        dtype = common_dtype([dtypes[name] for name in names])[0] if scheme is None else np.dtype(np.float32)
        own = tuple(layouts[name] for name in names)
        plan[tensor] = _Target(names, own, places[names[0]], layer, whole[tensor], dtype, scheme, how)
    return plan


def _by_parameters(plan: Mapping[str, _Target]) -> dict[tuple[str, ...], list[str]]:
    """Groups the tensors of `plan` by their parameters: returns tensor names, by tuples of canonical names."""
    found = dict[tuple[str, ...], list[str]]()
    for tensor, it in plan.items():
        found.setdefault(it.names, []).append(tensor)
    return found


def _stream(
    config: Config,
    name: str,
    leaves: Mapping[str, Leaf],
    kernels: Mapping[str, Any],
    target: _Target,
    part: int,
    tick: Tick,
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields the parameter's part of each tensor that contains it, layer by layer: (value,) or, if the parameter is
    quantized, (codes, scales)."""
    layout, stacked = target.layouts[part], target.where is not None
    if name in kernels:
        own = {it.rpartition("/")[2]: leaves[it] for it in names_of(nested({name: kernels[name]}))}
        head = head_to_reorder(config, layout, kernels[name].shape)
        yield from codes_and_scales(name, own, layout, stacked, head, tick)
        return
    leaf = leaves[name]
    head = head_to_reorder(config, layout, leaf.shape)
    for layer in leaf.layers(tick) if stacked else [leaf.read(leaf.dtype, tick)]:
        for value in layer if layout.of_experts else [layer]:
            yield (layout.to_theirs(value, head).astype(target.dtype, copy=False),)


def _in_order(plan: Mapping[str, _Target]) -> Tensors:
    """Returns all tensors in the order of the forward pass, so that shards contain consecutive layers."""

    def order(it: tuple[str, _Target]) -> tuple[int, int]:
        (name, *_), where = it[1].names, it[1].where
        return 1 if where else 0 if name.startswith("token_embedder/") else 2, it[1].layer

    return {name: it for tensor, target in sorted(plan.items(), key=order) for name, it in target.files(tensor).items()}


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
