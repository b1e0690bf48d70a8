"""Writes GGUF files, tensor by tensor."""

from collections.abc import Callable, Iterator, Mapping
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
from trainer.models.huggingface import Layout
from trainer.weights.gguf.fields import FREQUENCIES, llama3_frequencies, read_fields, written_fields
from trainer.weights.gguf.read import read_as
from trainer.weights.gguf.tensors import as_gguf, kinds, name_there, package
from trainer.weights.gguf.tokenizer import tokenizer_values
from trainer.weights.huggingface.config_json import config_json, length_notes, model_keys
from trainer.weights.huggingface.read import head_to_reorder, layouts_of, tensors_of
from trainer.weights.model_keys import check_same_model

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# general.file_type
_FILE_TYPES = {"F32": "ALL_F32", **{it: f"MOSTLY_{it}" for it in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1")}}
_TABLES = ("token_embd.weight", "output.weight")  # in eight bits where the matrices have four, as in llama.cpp's files
_ROUTER = "ffn_gate_inp.weight"
_VERSION = 2  # of the quantized types
_WORDS = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}


class _Written(NamedTuple):
    """The tensors of one leaf, one for each layer.

    Attributes:
      names: their names in the file.
      shape: of each.
      kind: the name of the type of each.
      of: the name in Hugging Face; see `Layout`.
    """

    names: list[str]
    shape: tuple[int, ...]
    kind: str
    of: str


def write_gguf(
    path: Path,
    config: Config,
    leaves: Mapping[str, Leaf],
    dtype: str | None,
    about: About,
    tokenizer: Path,
    say: Callable[[str], Any] = print,
) -> None:
    """Writes the model with `leaves` into the file `path`. Norms, biases and routers are float32.

    Args:
      config: resolved.
      dtype: of the matrices, `export.GGUF_DTYPES`; None: as stored.
      about: what the model's folder says of ends and lengths.
      tokenizer: the place of its tokenizer.
      say: gets a line for each thing that is written in another way than asked.

    Raises:
      UserError: llama.cpp has no such model or tokenizer; or a value does not fit into float16.
    """
    hf = hugging_face(config)
    if (it := hf.gguf) is None:
        raise UserError(
            f"format=gguf: models of the type {hf.model_type} are not written; docs/guides/weights.md has all"
        )
    if not dtype and (mixed := [name for name, leaf in leaves.items() if leaf.mixed]):
        raise UserError(f"{mixed[0]}: its layers are stored in several dtypes; give dtype=float32, which loses nothing")
    for note in length_notes(config, about.fields):
        say(note)
    data = config_json(config, "float32", about.fields)
    places = places_of(config, leaves)
    layouts = layouts_of(config, places)
    written = {}
    for name, leaf in leaves.items():
        tensors = tensors_of(layouts[name], places[name], leaf.shape)
        written[name] = _written(it, layouts[name], places[name], leaf, tensors[0][1], dtype)
    values = written_fields(it, data) | tokenizer_values(tokenizer, about, config.vocab_size, say)
    rope = data.get("rope_scaling") or {}
    factors = None
    if rope.get("rope_type") == "llama3":
        factors = llama3_frequencies(rope, data["rope_theta"], config.head_dim)
    _check(config, it, path, values, written, factors)
    most = _TYPES.get(dtype or "", (dtype or "").upper()) or written["token_embedder/embedding"].kind
    if other := [each.names[0] for each in written.values() if most.startswith("Q") and each.kind == "F16"]:
        say(f"rows that are no multiple of 32 values are written as float16: {', '.join(other)}")
    writer = _header(it, most, values, written, factors)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        with progress(leaves.values(), "writing", say) as tick:
            for name, each in written.items():
                head = head_to_reorder(config, layouts[name], leaves[name].shape)
                for value in _matrices(leaves[name], layouts[name], head, tick):
                    there = as_gguf(value, it, each.of, config.head_dim)
                    writer.write_tensor_data(_stored(there, each, path))
    finally:
        writer.close()


def _header(
    it: Gguf,
    most: str,
    values: Mapping[str, Any],
    written: Mapping[str, _Written],
    factors: np.ndarray | None,
) -> Any:
    """Returns a writer of the package with all keys and the places of all tensors. `most`: the type of most values."""
    gguf = package()
    writer = gguf.GGUFWriter(None, it.name)
    writer.add_type("model")
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[most]])
    writer.add_quantization_version(_VERSION)
    for key, value in values.items():
        add = _WORDS.get(type(value))
        getattr(writer, add or "add_array")(key, value if add else list(map(_plain, value)))
    if factors is not None:
        _announce(writer, FREQUENCIES, factors.shape, "F32")
    for each in written.values():
        for name in each.names:
            _announce(writer, name, each.shape, each.kind)
    return writer


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _written(it: Gguf, layout: Layout, place: Any, leaf: Leaf, shape: tuple[int, ...], dtype: str | None) -> _Written:
    there = name_there(it, layout.name)
    if there is None:
        raise UserError(f"format=gguf: llama.cpp's {it.name} has no tensor for {layout.name}")
    if layout.of_experts:
        shape = (leaf.shape[0 if place is None else 1], *shape)
    names = [there] if place is None else [there.format(i) for i in place.layers]
    plain = len(shape) == 1 or there.endswith(_ROUTER)
    if plain:
        kind = "F32"
    elif not dtype:
        kind = _TYPES[leaf.dtype.name]
    elif dtype in _TYPES:
        kind = _TYPES[dtype]
    elif shape[-1] % 32:
        kind = "F16"
    else:
        kind = "Q8_0" if there in _TABLES else dtype.upper()
    return _Written(names, shape, kind, layout.name)


def _check(
    config: Config,
    it: Gguf,
    path: Path,
    values: Mapping[str, Any],
    written: Mapping[str, _Written],
    factors: np.ndarray | None,
) -> None:
    """Compares the model with the one that reading the file will give.

    Raises:
      UserError: they differ.
    """
    tensors = {name: Described(0, each.shape, 0) for each in written.values() for name in each.names}
    header = GgufHeader(path, values, tensors, 0)
    try:
        keys = model_keys(read_fields(header, read_as(header, it.name), factors), str(path))
        check_same_model(keys, config, str(path), say=lambda line: None)
    except UserError as error:
        raise UserError(f"format=gguf: llama.cpp's {it.name} cannot represent this model:\n  {error}") from error


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: str) -> None:
    number = package().GGMLQuantizationType[kind]
    _, values, size = kinds()[int(number)]
    nbytes = int(np.prod(shape)) // values * size
    writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=number)


def _matrices(leaf: Leaf, layout: Layout, head: int, tick: Tick) -> Iterator[np.ndarray]:
    """Yields the tensor of each layer as Hugging Face stores it, those of experts together."""
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
