"""Converts the names of tensors, and the order of their entries, between GGUF files and Hugging Face."""

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trainer.config.errors import UserError, shortened
from trainer.config.words import visible
from trainer.leaves.gguf_file import GgufHeader
from trainer.leaves.source import Box
from trainer.models.gguf import Gguf
from trainer.models.huggingface import EXPERT

_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# The types that gguf 0.19 dequantizes. No block of values extends over two rows. NVFP4 is not supported, because its
# second scale is in another tensor.
QUANTIZED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ4_NL", "IQ4_XS"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"),
)
_STRIP = 1 << 22  # values to dequantize at once
# The matrix that maps latents to keys and values; in GGUF files, it is one tensor or two.
OF_LATENTS = "self_attn.kv_b_proj.weight"
MERGED = "self_attn.qkv_proj"
_LAYER = re.compile(r"model\.layers\.(\{\}|[0-9]+)\.")
_PERMUTED = tuple(f"self_attn.{name}_proj.{end}" for name in "qk" for end in ("weight", "bias"))


def package() -> Any:
    """Returns llama.cpp's package gguf.

    Raises:
      UserError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise UserError("GGUF files need the package gguf: pip install 'trainer[gguf]'") from error
    return gguf


@functools.cache
def kinds() -> Mapping[int, tuple[str, int, int]]:
    """Returns a dict from the number of a type to its name and its numbers of values and of bytes per block."""
    found = package().GGML_QUANT_SIZES.items()
    return {int(kind): (kind.name, *sizes) for kind, sizes in found}


def name_there(it: Gguf, name: str) -> str | None:
    """Returns the GGUF name of Hugging Face's tensor `name`; None if the architecture has no such tensor.

    Both names contain the same layer number, or {} in its place. A GGUF file stores all experts of a layer in one
    tensor.
    """
    gguf, number = package(), _LAYER.match(name)
    whole = name.replace(f".{EXPERT}", "").replace("_correction_bias", "_correction.bias")
    names = _names(next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == it.name))
    found = names.get_name(_LAYER.sub("model.layers.0.", whole), try_suffixes=(".weight", ".bias"))
    return found and found.replace("blk.0.", f"blk.{number[1]}." if number else "")


@functools.cache
def _names(arch: Any) -> Any:
    return package().get_tensor_name_map(arch, 1)


class GgufTensor(NamedTuple):
    """A tensor in a GGUF file; implements `huggingface.read.Values`.

    Attributes:
      type: the name of its type in ggml.
      block: the numbers of values and of bytes in a block.
      shape: the shape in Hugging Face.
      start: the offset of the tensor in the file, in bytes.
      head: the head size if the file interleaves the two halves of each head (as adjacent pairs); 0 if the order is the
        same as in Hugging Face.
      one: whether the values are stored with 1 added, which reading subtracts.
    """

    path: Path
    type: str
    block: tuple[int, int]
    shape: tuple[int, ...]
    start: int
    head: int = 0
    one: bool = False

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values that `read` returns."""
        return _FLOATS[self.kind]

    @property
    def kind(self) -> str:
        """The name of `dtype` in safetensors."""
        return self.type if self.type in _FLOATS and not self.one else "F32"

    @property
    def nbytes(self) -> int:
        """The size of the stored tensor in bytes."""
        return math.prod(self.shape) // self.block[0] * self.block[1]

    def rows(self, first: int, count: int) -> "GgufTensor":
        """Returns `count` rows, starting at row `first`, as a tensor."""
        each = self.nbytes // self.shape[0]
        return self._replace(shape=(count, *self.shape[1:]), start=self.start + first * each)

    def expert(self, i: int) -> "GgufTensor":
        """Returns entry `i` along the first axis, without that axis."""
        return self.rows(i, 1)._replace(shape=self.shape[1:])

    def read(self, box: Box) -> np.ndarray:
        """Returns the values in `box`. Reads complete rows, in strips.

        Raises:
          UserError: the file was truncated after it was opened.
        """
        rows, columns = np.arange(self.shape[0])[box[0]], math.prod(self.shape[1:])
        if self.head:
            halves = np.arange(self.shape[0]).reshape(-1, self.head // 2, 2).swapaxes(1, 2)
            rows = halves.reshape(-1)[box[0]]
        found = np.empty([cut.stop - cut.start for cut in box], self.dtype)
        step = max(1, _STRIP // columns)
        for at in range(0, len(rows), step):
            some = rows[at : at + step]
            first = int(some.min())
            values = self._rows(first, int(some.max()) + 1 - first, columns)[some - first]
            found[at : at + step] = values.reshape(len(some), *self.shape[1:])[(slice(None), *box[1:])]
        return found - 1 if self.one else found

    def _rows(self, first: int, count: int, columns: int) -> np.ndarray:
        values, size = self.block
        row = columns // values * size
        data = np.fromfile(self.path, np.uint8, count * row, offset=self.start + first * row)
        if len(data) < count * row:
            raise UserError(f"{self.path}: the file ends within its tensors")
        if self.type in _FLOATS:
            return data.view(_FLOATS[self.type]).reshape(count, columns)
        with np.errstate(all="ignore"):  # the scales in a file may be any number, so the product may overflow
            return package().dequantize(data.reshape(count, row), package().GGMLQuantizationType[self.type])


class KeysAndValues(NamedTuple):
    """The tensor `OF_LATENTS`, [heads * (keys + values), latent], which llama.cpp has split in two since April 2025.

    Attributes:
      keys: [heads, latent, keys].
      values: [heads, values, latent].
    """

    keys: GgufTensor
    values: GgufTensor

    @property
    def kind(self) -> str:
        return self.keys.kind if self.keys.kind == self.values.kind else "F32"

    @property
    def dtype(self) -> np.dtype:
        return _FLOATS[self.kind]

    @property
    def _rows(self) -> int:
        return self.keys.shape[2] + self.values.shape[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in Hugging Face."""
        return self.keys.shape[0] * self._rows, self.keys.shape[1]

    def read(self, box: Box) -> np.ndarray:
        """See `GgufTensor.read`. Reads complete heads."""
        first, stop = box[0].start // self._rows, -(-box[0].stop // self._rows)
        keys, values = (
            it.read((slice(first, stop), *(slice(0, size) for size in it.shape[1:]))).astype(self.dtype, copy=False)
            for it in self
        )
        whole = np.concatenate([keys.swapaxes(1, 2), values], 1).reshape(-1, self.keys.shape[1])
        return whole[box[0].start - first * self._rows : box[0].stop - first * self._rows, box[1]]


def latent_names(name: str) -> tuple[str, str]:
    """Returns Hugging Face-style names of the two GGUF tensors for `name`, which ends with `OF_LATENTS`."""
    return name.replace("kv_b", "k_b"), name.replace("kv_b", "v_b")


def joined_latents(it: Gguf, name: str, layer: int, stored: dict[str, GgufTensor]) -> dict[str, KeysAndValues]:
    """Removes the two tensors for `name` from `stored`, and returns a dict from the name to the joined tensor. If
    one is missing, or the two differ in the number of heads or latents, returns {} and removes nothing."""
    places = [place.format(layer) for each in latent_names(name) if (place := name_there(it, each))]
    parts = [stored[place] for place in places if place in stored and len(stored[place].shape) == 3]
    if len(parts) < 2 or (parts[0].shape[:2] != (parts[1].shape[0], parts[1].shape[2])):
        return {}
    for place in places:
        del stored[place]
    return {name.format(layer): KeysAndValues(*parts)}


def cut_latents(value: np.ndarray, name: str, keys: int, values: int) -> np.ndarray:
    """Returns one of the two GGUF tensors that `value`, a tensor `OF_LATENTS`, is split into.

    `name`: the one to return, from `latent_names`. `keys`, `values`: the sizes of a head's key and value.
    """
    heads = value.reshape(-1, keys + values, value.shape[-1])
    return heads[:, keys:] if "v_b" in name else heads[:, :keys].swapaxes(1, 2)


def divided(stored: Mapping[str, GgufTensor], data: Mapping[str, Any]) -> dict[str, GgufTensor]:
    """Returns `stored` with each merged query-key-value tensor split into three.

    Files of older GLM models contain merged tensors.

    Args:
      data: the content of a config.json.
    """
    found, heads = dict(stored), data["num_attention_heads"]
    groups = data.get("num_key_value_heads", heads)
    rows = [count * data["head_dim"] for count in (heads, groups, groups)]
    for name, tensor in stored.items():
        parts = [name.replace(".attn_qkv.", f".attn_{part}.") for part in "qkv"]
        if name not in parts and tensor.shape[0] == sum(rows) and stored.keys().isdisjoint(parts):
            del found[name]
            starts = 0, rows[0], rows[0] + rows[1]
            found |= {part: tensor.rows(*cut) for part, *cut in zip(parts, starts, rows, strict=True)}
    return found


def stored_tensors(header: GgufHeader) -> dict[str, GgufTensor]:
    """Returns the tensors of a file by their GGUF names.

    Raises:
      UserError: tensors have unsupported types, extend beyond the file, or overlap; the message lists them.
    """
    found, problems, free = dict[str, GgufTensor](), [], 0
    for name, (kind, shape, start) in sorted(header.tensors.items(), key=lambda it: it[1].start):
        type_name, *block = kinds().get(kind, (f"number {kind}", 1, 1))
        tensor = GgufTensor(header.path, type_name, (block[0], block[1]), shape, start)
        if type_name not in _FLOATS and (type_name not in QUANTIZED or shape[-1] % block[0]):
            problems.append(f"{shortened(visible(name))}: values of type {type_name} are not read")
        elif type_name not in _FLOATS and len(shape) < 2:
            problems.append(f"{shortened(visible(name))}: a list of values of type {type_name} is not read")
        elif start < free or start + tensor.nbytes > header.size:
            problems.append(f"{shortened(visible(name))}: its bytes are not in the file, or overlap another tensor")
        found[name], free = tensor, start + tensor.nbytes
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        known = ", ".join([*_FLOATS, *QUANTIZED])
        raise UserError("\n  ".join([f"{header.path}: (supported types: {known})", *problems[:20], *more]))
    return found


def as_hugging_face(tensor: GgufTensor, it: Gguf, name: str, head: int) -> GgufTensor:
    """Returns `tensor`, changed so that `read` returns the values of Hugging Face's tensor `name`. `head`: the head
    size."""
    permuted = it.pairs and name.endswith(_PERMUTED) and head > 1 and tensor.shape[0] % head == 0
    return tensor._replace(head=head if permuted else 0, one=it.one and name.endswith("norm.weight"))


def as_gguf(values: np.ndarray, it: Gguf, name: str, head: int) -> np.ndarray:
    """Returns the values of Hugging Face's tensor `name` as a GGUF file stores them; the inverse of
    `GgufTensor.read`."""
    if it.pairs and name.endswith(_PERMUTED):
        heads = values.reshape(-1, 2, head // 2, *values.shape[1:])
        return heads.swapaxes(1, 2).reshape(values.shape)
    return values.astype(np.float32) + 1 if it.one and name.endswith("norm.weight") else values
