"""Converts between the quantized kernels of `trainer.products.dequantized` and matrices in Hugging Face folders.

A kernel is [*in, *out] with a scale for each tile of inputs and outputs; a matrix is [out, in] with a scale for each
block of outputs and inputs.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import jax
import numpy as np

from trainer.config.capabilities.quantization_keys import METHODS, WHICH
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.leaves.source import Leaf, Tick, names_of, nested, whole
from trainer.models.huggingface import Layout, reordered, transposed
from trainer.models.matrices import matrix_names
from trainer.models.quantization import HEAD, MTP, ROUTER
from trainer.weights.huggingface.compressed_tensors import scheme_of
from trainer.weights.huggingface.packed_matrix import PackedMatrix
from trainer.weights.huggingface.quantization_config import Scheme

_PARTS = ("qvalue", "scale", "zero_point")
_AS_FLOATS = "give dtype=float32 or dtype=bfloat16, which writes floats"


def stored_keys(config: Config, matrices: Mapping[str, Sequence[Any]], others: Sequence[Any]) -> dict[str, Any]:
    """Returns the keys with which a model stores its weights quantized as the folder does. Returns {} if no weight is
    quantized, or if no such keys exist, for example because matrices are quantized in different ways. In the second
    case, the model must read the weights as floats.

    Args:
      config: the resolved configuration of the float model.
      matrices: the tensors of each matrix in `stored_matrices`, by the matrix's canonical name.
      others: all other tensors.
    """
    packed = [it for tensors in matrices.values() for it in tensors if isinstance(it, PackedMatrix)]
    whole_or_not = all(len({isinstance(it, PackedMatrix) for it in tensors}) == 1 for tensors in matrices.values())
    if not packed or not whole_or_not or any(isinstance(tensor, PackedMatrix) for tensor in others):
        return {}
    kinds, blocks = {it.kind_of_codes for it in packed}, {_block(it) for it in packed} - {None}
    block = blocks.pop() if blocks else None
    # A matrix with one scale per output also fits a block of one output that spans all inputs of the matrix.
    fits = all(_block(it) or (block[1] == 1 and it.shape[1] <= block[0]) for it in packed) if block else True
    asymmetric = any(it.has_zeros for it in packed)
    alike = len(kinds) == 1 and not blocks and fits and all(it.in_order for it in packed)
    kind = kinds.pop()
    if not alike or (asymmetric and kind == "fp8"):
        return {}
    floats = [name for name, tensors in matrices.items() if not any(isinstance(it, PackedMatrix) for it in tensors)]

    def any_quantized(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in matrices if name not in floats)

    chosen = dict(zip(WHICH[1:], map(any_quantized, (ROUTER, HEAD, MTP)), strict=True))
    left_out = [pattern for pattern, key in zip((ROUTER, HEAD, MTP), WHICH[1:], strict=True) if not chosen[key]]
    named = [name for name in floats if not any(re.search(pattern, name) for pattern in left_out)]
    return {
        "checkpoint_is_quantized": True,
        "quantization": kind,
        "weight_block_size": block,
        "weight_quantization_algorithm": "rounding",
        METHODS[0]: "minmax" if asymmetric else "absmax",
        "unquantized_modules": tuple(re.escape(name.removesuffix("/kernel")) for name in named),
        **chosen,
    }


def _block(matrix: PackedMatrix) -> tuple[int, int] | None:
    """Returns the numbers of inputs and outputs that share a scale; None if each output has one scale. A single scale
    for a complete matrix counts as one scale per output."""
    rows, columns = matrix.block
    return None if columns == matrix.shape[1] and rows in (1, matrix.shape[0]) else (columns, rows)


def stored_leaves(
    name: str, kernel: Any, layout: Layout, layers: Sequence[Sequence[PackedMatrix]], stacked: bool, head: int
) -> dict[str, Leaf]:
    """Returns the leaves of a quantized kernel's parts, by name. Values are read layer by layer.

    Args:
      name: the kernel's canonical name.
      kernel: the quantized kernel, as a pytree of ShapeDtypeStructs.
      layers: the matrices of each layer: one, or one for each expert.
      stacked: whether the kernel has an axis of layers.
      head: see `Layout.to_ours`.

    Raises:
      UserError: the blocks of the scales do not fit the kernel's tiles.
    """
    found = {}
    for path, like in names_of(nested({name: kernel})).items():
        part = path.rpartition("/")[2]
        assert part in _PARTS, path
        of_layer = functools.partial(_of_layer, name, kernel, layout, part, stacked, head)

        def put(layer: Sequence[PackedMatrix], abstract: jax.ShapeDtypeStruct, of_layer: Any = of_layer) -> jax.Array:
            value = of_layer(layer).reshape(abstract.shape).astype(abstract.dtype, copy=False)
            return jax.make_array_from_callback(abstract.shape, abstract.sharding, lambda box: value[box])

        parts = [functools.partial(of_layer, layer) for layer in layers]
        puts = [functools.partial(put, layer) for layer in layers]
        found[path] = Leaf(like.shape, np.dtype(like.dtype), parts, puts)
    return found


def _of_layer(
    name: str, kernel: Any, layout: Layout, part: str, stacked: bool, head: int, layer: Sequence[PackedMatrix]
) -> np.ndarray:
    """Returns one layer of a kernel's part (one of `_PARTS`)."""
    shape, like = kernel.qvalue.shape[int(stacked) :], getattr(kernel, part)
    one = shape[1:] if layout.of_experts else shape
    tiles = kernel.scale.shape[kernel.scale.ndim - len(one) :]
    values = [_part(name, matrix, layout, part, one, tiles, head) for matrix in layer]
    found = np.stack(values) if layout.of_experts else values[0]
    return found.astype(like.dtype)


def _part(
    name: str,
    matrix: PackedMatrix,
    layout: Layout,
    part: str,
    shape: tuple[int, ...],
    tiles: tuple[int, ...],
    head: int,
) -> np.ndarray:
    if part == "qvalue":
        return layout.to_ours(matrix.parts(whole(matrix.shape))[0], shape, head)
    scales, zeros = matrix.scales_and_zeros(whole(matrix.shape))
    if part == "zero_point":
        scales = np.zeros(scales.shape, np.int8) if zeros is None else zeros
    ways = []
    for axes, block in ((slice(layout.inputs, None), matrix.block[0]), (slice(0, layout.inputs), matrix.block[1])):
        count = prod(tiles[axes])
        size = prod(shape[axes]) // count
        if block % size and count > 1:
            raise UserError(f"{name}: its blocks of {block} that share a scale do not fit tiles of {size}")
        ways.append(np.arange(count) * size // block)
    ours = scales[ways[0]][:, ways[1]].T.reshape(tiles)
    if head and tiles[-1] == shape[-1]:
        return reordered(ours, head, pairs=True)
    if head and tiles[-1] > shape[-1] // head:
        raise UserError(
            f"{name}: a head has several scales, but its entries must be reordered; give "
            "rope_interleave=false, or checkpoint_is_quantized=false"
        )
    return ours


def scheme_out(name: str, kernel: Any, layout: Layout, stacked: bool) -> Scheme:
    """Returns the scheme in which a quantized kernel is written.

    Raises:
      UserError: compressed-tensors has no layout for this kernel.
    """
    if not layout.inputs or not hasattr(kernel, "qvalue"):
        form = "codes of nf4 or scales of AWQ" if layout.inputs else "a matrix outside of linear layers"
        raise UserError(f"{name}: compressed-tensors has no {form}; {_AS_FLOATS}")
    dtype = kernel.qvalue.dtype.name
    kind = {"int4": "int4", "int8": "int8", "float8_e4m3fn": "fp8"}.get(dtype)
    if kind is None or kernel.zero_point is not None:
        what = "zero points are" if kind else f"{dtype} is"
        raise UserError(f"{name}: {what} not written in the layout of compressed-tensors; {_AS_FLOATS}")
    first = int(stacked) + layout.of_experts
    shape, tiles = kernel.qvalue.shape[first:], kernel.scale.shape[first:]
    into, out = prod(shape[: layout.inputs]), prod(shape[layout.inputs :])
    columns, rows = into // prod(tiles[: layout.inputs]), out // prod(tiles[layout.inputs :])
    return scheme_of(kind, (rows, columns if rows > 1 or columns < into else 0))


def codes_and_scales(
    name: str, parts: Mapping[str, Leaf], layout: Layout, stacked: bool, head: int, tick: Tick
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (codes, scales) of each Hugging Face tensor of a kernel, for `compressed_tensors.arrays_of`. `parts`:
    the leaves of the kernel's parts, by the last component of their names."""

    def matrices(part: str) -> Iterator[np.ndarray]:
        leaf = parts[part]
        for layer in leaf.layers(tick) if stacked else [leaf.read(leaf.dtype, tick)]:
            yield from layer if layout.of_experts else [layer]

    for codes, scale in zip(matrices("qvalue"), matrices("scale"), strict=True):
        if head and scale.shape[-1] not in (1, codes.shape[-1]):
            raise UserError(f"{name}: a head has several scales, and its entries must be reordered; {_AS_FLOATS}")
        values = codes.astype(np.int8) if codes.dtype.name == "int4" else codes
        scale = reordered(scale, head if scale.shape[-1] > 1 else 0, pairs=False)
        scales = transposed(np.ascontiguousarray(scale.reshape(prod(scale.shape[: layout.inputs]), -1)))
        yield layout.to_theirs(values, head), scales


def stored_matrices(config: Config) -> list[str]:
    """Returns the canonical names of the matrices that can be stored quantized (`matrix_names`); [] if a block is a
    custom Linen module."""
    try:
        return matrix_names(config)
    except UserError:
        return []
