"""Writes GGUF files, tensor by tensor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.leaves.about import About
from trainer.leaves.gguf_file import Described, GgufHeader
from trainer.leaves.source import Leaf, Tick, progress
from trainer.models.families import hugging_face, places_of
from trainer.models.gguf import Gguf
from trainer.models.huggingface import Layout, Merged
from trainer.weights.gguf.fields import read_fields, written_factors, written_fields
from trainer.weights.gguf.read import read_as
from trainer.weights.gguf.tensors import (
    OF_LATENTS,
    as_gguf,
    cut_latents,
    kinds,
    latent_names,
    name_there,
    package,
)
from trainer.weights.gguf.tokenizer import tokenizer_values
from trainer.weights.huggingface.config_json import config_json, length_notes, model_keys
from trainer.weights.huggingface.merged import whole_of
from trainer.weights.huggingface.read import head_to_reorder, layouts_of, tensors_of
from trainer.weights.model_keys import check_same_model

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Maps the type of most weights in a file to the name of the file's type (general.file_type).
_FILE_TYPES = {"F32": "ALL_F32", **{it: f"MOSTLY_{it}" for it in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1")}}
_TABLES = ("token_embd.weight", "output.weight")  # stored in 8 bits if other matrices use 4 bits, as llama.cpp does
_ROUTER = "ffn_gate_inp.weight"
_VERSION = 2  # the value of general.quantization_version
_WORDS = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}


class _Written(NamedTuple):
    """The tensors of one leaf, or of several merged leaves: one tensor for each layer.

    Attributes:
      leaves: the canonical names of the leaves.
      names: the names of the tensors in the file.
      shape: the shape of each tensor.
      kind: the name of each tensor's type.
      of: the tensor's name in Hugging Face; see `Layout`.
      how: how the leaves are merged; None for a single leaf that is not merged.
    """

    leaves: tuple[str, ...]
    names: list[str]
    shape: tuple[int, ...]
    kind: str
    of: str
    how: Merged | None


def write_gguf(
    path: Path,
    config: Config,
    leaves: Mapping[str, Leaf],
    dtype: str | None,
    about: About,
    tokenizer: Path,
    say: Callable[[str], Any] = print,
) -> None:
    """Writes the model with the weights `leaves` into the file `path`. Norms, biases and routers are float32.

    Args:
      config: the resolved configuration.
      dtype: the dtype of the matrices, one of `export.GGUF_DTYPES`; None: their current dtype.
      about: the model's metadata, including the tokens that end a text and the maximum text length.
      tokenizer: the folder or file of the model's tokenizer.
      say: receives a line for each deviation from what was requested.

    Raises:
      UserError: llama.cpp cannot represent the model or its tokenizer, or a value is too large for float16.
    """
    hf = hugging_face(config)
    if hf.gguf is None:
        raise UserError(
            f"format=gguf does not support models of type {hf.model_type}; docs/guides/weights.md lists the supported "
            "models"
        )
    if not dtype and (mixed := [name for name, leaf in leaves.items() if leaf.mixed]):
        raise UserError(f"{mixed[0]}: its layers are stored in several dtypes; give dtype=float32, which is lossless")
    for note in length_notes(config, about.fields):
        say(note)
    data = config_json(config, "float32", about.fields)
    if why := hf.gguf.refuses(data):
        raise UserError(f"format=gguf: llama.cpp's {hf.gguf.name} cannot represent this model:\n  {why}")
    written, factors = _plan(config, leaves, dtype), written_factors(data)
    values = written_fields(hf, data) | tokenizer_values(tokenizer, about, config.vocab_size, say)
    _check(config, path, values, written, factors)
    if hf.gguf.note:
        say(f"llama.cpp's {hf.gguf.name} differs: {hf.gguf.note}")
    most = _TYPES.get(dtype or "", (dtype or "").upper()) or written[0].kind
    if other := [each.names[0] for each in written if most.startswith("Q") and each.kind == "F16"]:
        say(f"tensors with rows that are not a multiple of 32 values are written as float16: {', '.join(other)}")
    writer = _header(hf.gguf, most, values, written, factors)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for factor in factors.values():
            writer.write_tensor_data(factor)
        with progress(leaves.values(), "writing", say) as tick:
            for each in written:
                for value in _tensors(config, leaves, each, tick):
                    writer.write_tensor_data(_stored(value, each, path))
    finally:
        writer.close()


def _plan(config: Config, leaves: Mapping[str, Leaf], dtype: str | None) -> list[_Written]:
    """Returns a description of all tensors to write, beginning with the embedding table."""
    hf, places = hugging_face(config).in_gguf(), places_of(config, leaves)
    assert hf.gguf
    layouts = layouts_of(config, places, hf)
    parts = dict[tuple[Any, ...], dict[int, str]]()
    for name, place in places.items():
        whole = whole_of(layouts[name].name, hf.merged)
        key = (whole.name if whole else layouts[name].name, place and tuple(place.layers), whole and whole.how)
        parts.setdefault(key, {})[whole.part if whole else 0] = name
    written = []
    for (of, _, how), each in parts.items():
        names = tuple(each[i] for i in sorted(each))
        kinds_of = {leaves[name].dtype.name for name in names}
        if not dtype and len(kinds_of) > 1:
            raise UserError(f"{of}: its parts are stored in several dtypes; give dtype=float32, which is lossless")
        shapes = [tensors_of(layouts[name], places[name], leaves[name].shape)[0][1] for name in names]
        axis = how.axis % len(shapes[0]) if how else 0
        shape = tuple(sum(sizes) if i == axis else sizes[0] for i, sizes in enumerate(zip(*shapes, strict=True)))
        if layouts[names[0]].of_experts:
            shape = (leaves[names[0]].shape[0 if places[names[0]] is None else 1], *shape)
        for tensor, own in _cut(config, of, shape):
            if (there := name_there(hf.gguf, tensor)) is None:
                raise UserError(f"format=gguf: llama.cpp's {hf.gguf.name} has no tensor for {tensor}")
            place = places[names[0]]
            in_file = [there] if place is None else [there.format(i) for i in place.layers]
            kind = _kind(there, own, dtype, *kinds_of)
            written.append(_Written(names, in_file, own, kind, tensor, how))
    return sorted(written, key=lambda each: each.names[0] != _TABLES[0])


def _cut(config: Config, of: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the name (in Hugging Face's style) and the shape of each tensor that the file stores for Hugging Face's
    tensor `of`: two tensors if `of` ends with `OF_LATENTS`, otherwise one."""
    if not of.endswith(OF_LATENTS):
        return [(of, shape)]
    keys, values = latent_names(of)
    heads, latent = config.base_num_query_heads, shape[1]
    return [(keys, (heads, latent, config.qk_nope_head_dim)), (values, (heads, config.v_head_dim, latent))]


def _kind(there: str, shape: tuple[int, ...], dtype: str | None, stored: str, *rest: str) -> str:
    if len(shape) == 1 or there.endswith((_ROUTER, ".bias")):
        return "F32"
    if not dtype:
        return _TYPES[stored]
    if dtype in _TYPES:
        return _TYPES[dtype]
    if shape[-1] % 32:
        return "F16"
    return "Q8_0" if there in _TABLES else dtype.upper()


def _tensors(config: Config, leaves: Mapping[str, Leaf], each: _Written, tick: Tick) -> Iterator[np.ndarray]:
    """Yields each layer's tensor in the form of the file, with all experts of a layer in one tensor."""
    hf = hugging_face(config).in_gguf()
    layouts = layouts_of(config, places_of(config, leaves), hf)
    assert hf.gguf
    again = each.of == latent_names(each.of)[1] != each.of  # the second part of a leaf that was already read
    streams = []
    for name in each.leaves:
        head = head_to_reorder(config, layouts[name], leaves[name].shape)
        streams.append(_matrices(leaves[name], layouts[name], head, (lambda size: None) if again else tick))
    for parts in zip(*streams, strict=True):
        value = each.how.joined(parts) if each.how else parts[0]
        if layouts[each.leaves[0]].name.endswith(OF_LATENTS):
            value = cut_latents(value, each.of, config.qk_nope_head_dim, config.v_head_dim)
        yield as_gguf(value, hf.gguf, each.of, config.head_dim)


def _header(
    it: Gguf,
    most: str,
    values: Mapping[str, Any],
    written: Sequence[_Written],
    factors: Mapping[str, np.ndarray],
) -> Any:
    """Returns a GGUFWriter of package gguf, with all keys and tensor metadata. `most`: the type of most values."""
    gguf = package()
    writer = gguf.GGUFWriter(None, it.name)
    writer.add_type("model")
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[most]])
    writer.add_quantization_version(_VERSION)
    for key, value in values.items():
        add = _WORDS.get(type(value))
        getattr(writer, add or "add_array")(key, value if add else list(map(_plain, value)))
    for name, factor in factors.items():
        _announce(writer, name, factor.shape, "F32")
    for each in written:
        for name in each.names:
            _announce(writer, name, each.shape, each.kind)
    return writer


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _check(
    config: Config,
    path: Path,
    values: Mapping[str, Any],
    written: Sequence[_Written],
    factors: Mapping[str, np.ndarray],
) -> None:
    """Checks that reading the file back would yield the same model. Compares numbers as float32, as in the file.

    Raises:
      UserError: the two models differ.
    """
    it = hugging_face(config).gguf
    assert it
    tensors = {name: Described(0, each.shape, 0) for each in written for name in each.names}
    header = GgufHeader(path, values, tensors, 0)
    try:
        keys = model_keys(read_fields(header, read_as(header, it.name), factors), str(path))
        numbers = {name: config[name] for name, value in keys.items() if isinstance(value, float | tuple)}
        same = {name for name in numbers if _rounded(numbers[name]) == _rounded(keys[name])}
        check_same_model(keys | {name: config[name] for name in same}, config, str(path), say=lambda line: None)
    except UserError as error:
        raise UserError(f"format=gguf: llama.cpp's {it.name} cannot represent this model:\n  {error}") from error


def _rounded(value: Any) -> Any:
    each = value if isinstance(value, tuple) else (value,)
    return tuple(np.float32(it) if isinstance(it, float) else it for it in each)


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: str) -> None:
    number = package().GGMLQuantizationType[kind]
    _, values, size = kinds()[int(number)]
    nbytes = int(np.prod(shape)) // values * size
    writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=number)


def _matrices(leaf: Leaf, layout: Layout, head: int, tick: Tick) -> Iterator[np.ndarray]:
    """Yields each layer's tensor in Hugging Face's form, with all experts of a layer in one tensor."""
    for layer in leaf.layers(tick) if "{}" in layout.name else [leaf.read(leaf.dtype, tick)]:
        if layout.of_experts:
            yield np.stack([layout.to_theirs(value, head) for value in layer])
        else:
            yield layout.to_theirs(layer, head)


def _stored(value: np.ndarray, each: _Written, path: Path) -> np.ndarray:
    if each.kind == "BF16":
        return np.ascontiguousarray(value.astype(ml_dtypes.bfloat16)).view(np.uint16)
    value = np.ascontiguousarray(value.astype(np.float32, copy=False))
    if each.kind == "F16":
        with np.errstate(over="ignore"):
            half = value.astype(np.float16)
        if not np.array_equal(np.isfinite(half), np.isfinite(value)):
            raise UserError(f"{path}: {each.names[0]}: a value is too large for float16; give dtype=bfloat16")
        return half
    return value if each.kind == "F32" else package().quantize(value, package().GGMLQuantizationType[each.kind])
