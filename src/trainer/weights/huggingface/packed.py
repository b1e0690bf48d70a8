"""Quantized matrices in Hugging Face folders: several tensors store one `PackedMatrix`.

The tensors of a module's matrix [out, in] depend on `Scheme.layout`. A word is an int32 with 32 / bits integers,
which are neighbors along an axis, by default the last.

| layout | codes | scales | zero points |
|---|---|---|---|
| packed | `weight_packed`, words [out, in], `weight_shape` | `weight_scale` | `weight_zero_point`, words along out |
| plain | `weight`, int8 or float8 | `weight_scale` | `weight_zero_point`, int8 |
| inverse | `weight`, float8 | `weight_scale_inv` or `weight_scale` | |
| gptq | `qweight`, words [in, out] along in | `scales` [groups, out] | `qzeros`, words [groups, out] along out |
| awq | `qweight`, words [in, out] along out | `scales` [groups, out] | `qzeros`, words [groups, out] along out |

A weight is (code - zero point) * scale. The layouts come from these programs: packed and plain from compressed-tensors
0.20; inverse from the conversion script of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2); gptq from AutoGPTQ 0.8 and
GPTQModel; awq from AutoAWQ 0.2.
"""

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.config.errors import UserError, shortened
from trainer.weights.huggingface.mxfp4 import Blocks, with_blocks
from trainer.weights.huggingface.packed_matrix import PackedMatrix
from trainer.weights.huggingface.packed_words import AWQ_ORDER, WORD, Readable, Turned, Words
from trainer.weights.huggingface.quantization_config import Recipe, Scheme
from trainer.weights.huggingface.safetensors_file import DTYPES, FLOAT8, StoredTensor

_LARGEST = 20  # the maximum number of lines in a message
# The last components of the names of a module's tensors: of codes and of scales, each by layout; then of zero points,
# of groups and of the shape. If several names are listed for one tensor, the first that exists is used.
_CODES = {
    **{"packed": ("weight_packed",), "plain": ("weight",), "inverse": ("weight",)},
    **{"gptq": ("qweight",), "awq": ("qweight",)},
}
_SCALES = {
    **{"packed": ("weight_scale",), "plain": ("weight_scale",), "inverse": ("weight_scale_inv", "weight_scale")},
    **{"gptq": ("scales",), "awq": ("scales",)},
}
_ZEROS, _GROUPS, _SHAPE = ("weight_zero_point", "qzeros"), ("weight_g_idx", "g_idx"), "weight_shape"
_NAMES = (*_CODES.values(), *_SCALES.values(), _ZEROS, _GROUPS, (_SHAPE,))
_PARTS = {name for names in _NAMES for name in names} - {"weight"}
# The last components of the names of tensors that only programs with quantized activations read.
_OF_ACTIVATIONS = {"activation_scale"} | {
    f"{of}_{it}" for of in ("input", "output", "q", "k", "v", "kv") for it in ("scale", "zero_point")
}


def with_matrices(
    tensors: Mapping[str, StoredTensor], recipe: Recipe, where: Path
) -> dict[str, StoredTensor | PackedMatrix]:
    """Returns `tensors` with the tensors of each quantized matrix replaced by the matrix, under the name
    that the matrix has in an unquantized folder. Omits scales of activations.

    Raises:
      UserError: lists tensors that are missing or have a wrong shape or dtype, and matrices that no target of `recipe`
        matches.
    """
    if recipe.mxfp4:
        tensors = with_blocks(tensors)
    joined: dict[str, StoredTensor | PackedMatrix] = {}
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last in _PARTS or (last == "weight" and (tensor.kind in (FLOAT8, "I8") or _scaled(module, tensors))):
            modules.setdefault(module, {})[last] = tensor
        elif last not in _OF_ACTIVATIONS:
            joined[name] = tensor
    problems: list[str] = []
    for (module, parts), scheme in zip(modules.items(), recipe.schemes_of(list(modules)), strict=True):
        if scheme is None:
            problems.append(f"{shortened(module)}: quantized, but no target of quantization_config matches it")
            continue
        try:
            joined[f"{module}.weight"] = _matrix(module, parts, scheme)
        except UserError as error:
            problems.append(str(error))
    if problems:
        more = [f"and {len(problems) - _LARGEST} more"] if len(problems) > _LARGEST else []
        head = f"{where}: tensors that do not fit the quantization that config.json describes:"
        raise UserError("\n  ".join([head, *problems[:_LARGEST], *more]))
    return joined


def note(tensors: Mapping[str, StoredTensor | PackedMatrix], recipe: Recipe, *, as_floats: bool) -> str:
    """Returns a line on how quantized matrices are read; "" if there are none. `as_floats`: whether they are
    dequantized."""
    if count := sum(isinstance(tensor, Blocks) for tensor in tensors.values()):
        return f"{count} tensors of experts are stored as MXFP4; they are read as bfloat16"
    matrices = [tensor for tensor in tensors.values() if isinstance(tensor, PackedMatrix)]
    kinds = collections.Counter(matrix.scheme.words for matrix in matrices)
    if not kinds:
        return ""
    stored = ", ".join(f"{count} matrices are stored as {words}" for words, count in kinds.items())
    more = "; activations are not quantized" if recipe.activations else ""
    return f"{stored}; they {'are read as float32' if as_floats else 'stay quantized'}{more}"


def _scaled(module: str, tensors: Mapping[str, StoredTensor]) -> bool:
    return any(f"{module}.{name}" in tensors for name in ("weight_scale", "weight_scale_inv"))


class _Parts(NamedTuple):
    """The tensors of a module, by the last components of their names."""

    module: str
    tensors: Mapping[str, StoredTensor]

    def find(self, names: Sequence[str], kinds: Sequence[str]) -> tuple[str, StoredTensor]:
        """Returns the full name and the tensor of the first name in `names` that exists.

        Raises:
          UserError: none of the names exists, or the tensor's dtype is not in `kinds`.
        """
        last = next((name for name in names if name in self.tensors), None)
        if last is None:
            raise UserError(f"{self.full(names[0])}: missing")
        tensor = self.tensors[last]
        if tensor.kind not in kinds:
            raise UserError(f"{self.full(last)}: stored as {tensor.kind}, wanted {' or '.join(kinds)}")
        return self.full(last), tensor

    def full(self, last: str) -> str:
        """Returns the full name of a tensor, given its last component."""
        return shortened(f"{self.module}.{last}")


def _matrix(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> PackedMatrix:
    """Returns the matrix that a module's tensors form.

    Raises:
      UserError: a tensor is missing or has a wrong shape or dtype.
    """
    parts = _Parts(module, tensors)
    codes = _codes(parts, scheme)
    out, into = codes.shape
    name, stored = parts.find(_SCALES[scheme.layout], tuple(DTYPES))
    turned = scheme.layout in ("gptq", "awq")
    scales = Turned(stored) if turned else _with_axes(stored)
    rows, columns = scheme.block[0] or out, scheme.block[1] or into
    if scheme.block == (0, 0) and scales.shape == (out, 1):
        rows = 1
    tiles = (-(-out // rows), -(-into // columns))
    _check(name, scales.shape, tiles)
    zeros = _zeros(parts, scheme, tiles)
    groups = None
    names = _GROUPS[1:] if turned else _GROUPS[:1]
    if columns < into and (scheme.ordered or names[0] in tensors):
        name, groups = parts.find(names, ("I32", "I64"))
        _check(name, groups.shape, (into,))
    return PackedMatrix(f"{module}.weight", codes, scales, zeros, groups, (rows, columns), scheme, stored.path.parent)


def _codes(parts: _Parts, scheme: Scheme) -> StoredTensor | Words:
    whole = scheme.layout in ("plain", "inverse")
    kind = "I32" if not whole else FLOAT8 if scheme.kind == "fp8" else "I8"
    name, tensor = parts.find(_CODES[scheme.layout], (kind,))
    if len(tensor.shape) != 2 or min(tensor.shape) < 1:
        raise UserError(f"{name}: found {list(tensor.shape)}, wanted two axes")
    if whole:
        return tensor
    bits, (first, second) = scheme.bits, tensor.shape
    per = WORD // bits
    if scheme.layout == "gptq":
        return Words(tensor, (second, first * per), bits, axis=0, turned=True)
    if scheme.layout == "awq":
        return Words(tensor, (second * per, first), bits, turned=True, order=AWQ_ORDER)
    name, stored = parts.find((_SHAPE,), ("I64", "I32"))
    _check(name, stored.shape, (2,))
    out, into = stored.read((slice(0, 2),)).tolist()
    if out != first or -(-into // per) != second:
        raise UserError(
            f"{name}: contains {[out, into]}, but {_CODES['packed'][0]} has {[first, second]} words of {per}"
        )
    return Words(tensor, (out, into), bits)


def _zeros(parts: _Parts, scheme: Scheme, tiles: tuple[int, int]) -> Readable | None:
    bits, per = scheme.bits, WORD // scheme.bits
    if scheme.layout in ("gptq", "awq"):
        name, tensor = parts.find(_ZEROS[1:], ("I32",))
        _check(name, tensor.shape, (tiles[1], -(-tiles[0] // per)))
        order = AWQ_ORDER if scheme.layout == "awq" else ()
        return Words(tensor, tiles, bits, turned=True, order=order, less_one=scheme.less_one)
    if scheme.layout == "packed" and scheme.zeros:
        name, tensor = parts.find(_ZEROS[:1], ("I32",))
        _check(name, tensor.shape, (-(-tiles[0] // per), tiles[1]))
        return Words(tensor, tiles, bits, axis=0)
    if not scheme.zeros and _ZEROS[0] not in parts.tensors:
        return None
    name, tensor = parts.find(_ZEROS[:1], ("I8", FLOAT8))
    _check(name, _with_axes(tensor).shape, tiles)
    return _with_axes(tensor)


def _with_axes(tensor: StoredTensor) -> StoredTensor:
    """Returns scales or zero points with two axes. A single stored axis is the axis of outputs."""
    return tensor if len(tensor.shape) > 1 else tensor._replace(shape=((*tensor.shape, 1, 1))[:2])


def _check(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise UserError(f"{name}: found {list(found)}, wanted {list(wanted)}")
