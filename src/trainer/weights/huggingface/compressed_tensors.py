"""Converts quantized matrices to the format of compressed-tensors (0.20), which transformers and vLLM can load.

int4 and int8 matrices become `pack-quantized`: symmetric, with one scale per output or per group of inputs.
float8_e4m3fn matrices become `float-quantized`: with one scale per matrix, per output or per block. Activations are
not quantized. All functions are pure; `trainer.weights.huggingface.packed` reads the format.
"""

import collections
from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from trainer.config.errors import UserError
from trainer.weights.huggingface.packed_words import WORD, packed_words
from trainer.weights.huggingface.quantization_config import Scheme
from trainer.weights.huggingface.safetensors_file import Tensors

_CODES = {"int4": np.dtype(np.int8), "int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
_FORMATS = {"packed": "pack-quantized", "plain": "float-quantized"}
_SUFFIX = ".weight"
FLOAT32 = np.dtype(np.float32)


def scheme_of(kind: str, block: tuple[int, int]) -> Scheme:
    """Returns the scheme in which matrices of this kind are written.

    Args:
      kind: "int4", "int8" or "fp8" (e4m3).
      block: the numbers of outputs and of inputs that share a scale; 0: all of them.

    Raises:
      UserError: compressed-tensors has no layout for this kind and block.
    """
    if kind not in _CODES:
        raise UserError(f"compressed-tensors: kind {kind} cannot be written; known: {', '.join(_CODES)}")
    rows, columns = block
    if rows != 1 and (kind != "fp8" or (rows == 0) != (columns == 0)):
        known = "one output" if kind != "fp8" else "one output, blocks of both axes, or the whole matrix"
        raise UserError(
            f"compressed-tensors: {kind} with scales of {list(block)} weights cannot be written; known: {known}"
        )
    return Scheme(kind, block, "plain" if kind == "fp8" else "packed")


def tensors_of(name: str, shape: tuple[int, int], scheme: Scheme, scales: np.dtype = FLOAT32) -> Tensors:
    """Returns the shape and the dtype of each tensor that stores a matrix, by the tensor's name.

    Args:
      name: the matrix's name in a folder that is not quantized, such as "model.layers.0.mlp.up_proj.weight".
      shape: [out, in].
      scheme: from `scheme_of`.
      scales: the dtype of the scales: float32, bfloat16 or float16.

    Raises:
      UserError: the size of a group does not divide the inputs, so other programs could not read the matrix.
    """
    out, into = shape
    if scheme.block[1] and into % scheme.block[1]:
        raise UserError(f"{name}: {into} inputs are not a multiple of {scheme.block[1]}, the group size")
    tiles = tuple(-(-size // (part or size)) for size, part in zip(shape, scheme.block, strict=True))
    scale = {f"{name}_scale": ((1,) if scheme.block == (0, 0) else tiles, scales)}
    if scheme.layout == "plain":
        return {name: (shape, _CODES[scheme.kind])} | scale
    words = {f"{name}_packed": ((out, -(-into * scheme.bits // WORD)), np.dtype(np.int32))}
    return words | scale | {f"{name}_shape": ((2,), np.dtype(np.int64))}


def arrays_of(
    name: str, codes: np.ndarray, scales: np.ndarray, scheme: Scheme, dtype: np.dtype = FLOAT32
) -> dict[str, np.ndarray]:
    """Returns the values of the tensors that `tensors_of` describes.

    Args:
      codes: [out, in]; float8_e4m3fn for fp8, int8 for int8, and int8 with values in [-8, 7] for int4.
      scales: [blocks of outputs, blocks of inputs]; a weight is its code times the scale of its block.
      dtype: the dtype of the stored scales.
    """
    assert codes.dtype == _CODES[scheme.kind], name
    wanted = tensors_of(name, codes.shape, scheme, dtype)
    arrays = {f"{name}_scale": scales.astype(dtype, copy=False).reshape(wanted[f"{name}_scale"][0])}
    if scheme.layout == "plain":
        return arrays | {name: codes}
    assert scheme.bits == 8 or (codes.min() >= -8 and codes.max() <= 7), name
    shape = np.array(codes.shape, np.int64)
    return arrays | {f"{name}_packed": packed_words(codes, scheme.bits), f"{name}_shape": shape}


def quantization_config(schemes: Mapping[str, Scheme], others: Collection[str]) -> dict[str, Any]:
    """Returns the value of `quantization_config` in config.json.

    Args:
      schemes: the scheme of each quantized matrix, by the matrix's name.
      others: the names of the float matrices of linear layers, such as "lm_head.weight"; without embedding tables.
    """
    counts = collections.Counter(schemes.values()).most_common()
    groups = {}
    for i, (scheme, _) in enumerate(counts):
        own = [name.removesuffix(_SUFFIX) for name, each in schemes.items() if each == scheme]
        # The most frequent scheme targets the class Linear. The other schemes target modules by name, and names take
        # precedence over the class.
        targets = own if i else ["Linear"]
        groups[f"group_{i}"] = {
            **{"targets": targets, "weights": _weights(scheme), "format": _FORMATS[scheme.layout]},
            **{"input_activations": None, "output_activations": None},
        }
    formats = {_FORMATS[scheme.layout] for scheme, _ in counts}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [name.removesuffix(_SUFFIX) for name in others],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weights(scheme: Scheme) -> dict[str, Any]:
    rows, columns = scheme.block
    strategy = "tensor" if rows == 0 else "block" if rows > 1 else "group" if columns else "channel"
    return {
        "num_bits": scheme.bits,
        "type": "float" if scheme.kind == "fp8" else "int",
        "symmetric": True,
        "strategy": strategy,
        "group_size": columns if strategy == "group" else None,
        "block_structure": [rows, columns] if strategy == "block" else None,
        "dynamic": False,
    }
