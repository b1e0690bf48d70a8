"""Reads Hugging Face directories: config.json, and safetensors in one file or in shards."""

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.json_files import read_object
from trainer.config.keys import Config
from trainer.leaves.source import (
    Box,
    Leaf,
    Shapes,
    check_tensors,
    common_dtype,
    names_of,
    nested,
    put_slices,
    whole,
    within,
)
from trainer.models.families import Place, hugging_face, places_of
from trainer.models.huggingface import EXPERT, HuggingFace, Layout
from trainer.models.mtp_names import (
    MODULES,
    hugging_face_copies,
    hugging_face_layouts,
    in_other_module,
    module_problem,
)
from trainer.weights.about_files import about_in
from trainer.weights.huggingface.bundled import with_experts
from trainer.weights.huggingface.config_fields import neutral_keys
from trainer.weights.huggingface.config_json import declaration, model_keys
from trainer.weights.huggingface.merged import stored_name, whole_shapes, with_parts
from trainer.weights.huggingface.packed import note, with_matrices
from trainer.weights.huggingface.packed_matrix import PackedMatrix
from trainer.weights.huggingface.packed_words import Readable
from trainer.weights.huggingface.quantization_config import recipe
from trainer.weights.huggingface.quantized_kernels import stored_keys, stored_leaves, stored_matrices
from trainer.weights.huggingface.safetensors_file import DTYPES, StoredTensor
from trainer.weights.huggingface.towers import text_model
from trainer.weights.huggingface.weight_files import BUFFER, model_tensors, other_forms
from trainer.weights.model_keys import model_config
from trainer.weights.stored import stored_kernels

CONFIG = "config.json"
_ROWS = 4096  # the number of rows of a table to compare at once


class Values(Readable, Protocol):
    """The values of a tensor, which are read in parts."""

    @property
    def dtype(self) -> np.dtype:
        """The stored dtype."""


class HuggingFaceSource:
    """See `Source`.

    Attributes:
      text: the text model of a multimodal model, the only part that is read; None for other models.
      quantized: whether config.json declares quantized matrices.
    """

    kind = "Hugging Face"
    averaged = False

    def __init__(self, path: Path, decoder_block: str = ""):
        """`decoder_block`: see `model_keys`.

        Raises:
          UserError: config.json cannot be represented by keys, or a file is missing or damaged.
        """
        self.path = self.tokenizer = path
        config, tensors = read_object(path / CONFIG), model_tensors(path)
        self.text = text_model(config, tensors, path / CONFIG, decoder_block)
        if self.text:
            config, tensors = self.text.config, self.text.tensors
        keys = model_keys(config, str(path / CONFIG), decoder_block)
        hf = declaration(config, str(path / CONFIG), decoder_block)[1]
        self.about = about_in(path, neutral_keys(config, str(path / CONFIG)))
        self.length = config.get("max_position_embeddings")
        tensors = with_experts(tensors, hf)
        self._tensors: Mapping[str, StoredTensor | PackedMatrix] = tensors
        self._others = other_forms(path)
        self._recipe = recipe(config, [])
        self.quantized = self._recipe is not None
        if self._recipe:
            self._tensors = with_matrices(tensors, self._recipe, path)
        if self.text:
            self._tensors = {self.text.alone(name): tensor for name, tensor in self._tensors.items()}
        self.modules = hf.mtp.number(keys["base_num_decoder_layers"], self._tensors)
        self._dropped = (
            f"{hf.mtp.field}={config[hf.mtp.field]}" if config.get(hf.mtp.field) and not self.modules else ""
        )
        self._float_keys = {**keys, MODULES: self.modules}  # counted: config.json may declare modules that are missing

    @functools.cached_property
    def keys(self) -> Mapping[str, Any]:
        """See `Source`. Computed on first use, so that callers that need only the tokenizer trace no model."""
        packed = any(isinstance(tensor, PackedMatrix) for tensor in self._tensors.values())
        return {**self._float_keys, **(self._stored_keys() if packed else {})}

    def notes(self, config: Config) -> Sequence[str]:
        """See `Source.notes`. Reports which weights are not read, and how quantized matrices are read."""
        matrices = (
            note(self._tensors, self._recipe, as_floats=not config.checkpoint_is_quantized) if self._recipe else ""
        )
        towers = self.text.note() if self.text else ""
        dropped = f"config.json has {self._dropped}, but the files have no tensors of a module" if self._dropped else ""
        return tuple(f"{self.path}: {line}" for line in (towers, self._others, matrices, dropped) if line)

    def _stored_keys(self) -> dict[str, Any]:
        config = model_config(self._float_keys, [], str(self.path))
        layouts = hugging_face_layouts(config)
        params = names_of(make_model(config).abstract[0])
        places = places_of(config, params)
        named = {
            name: dict(tensors_of(layouts[name], places[name], it.shape))
            for name, it in params.items()
            if name in layouts
        }
        shapes = {tensor: shape for each in named.values() for tensor, shape in each.items()}
        tensors = with_parts(self._tensors, shapes, hugging_face(config).merged)
        matrices = {name: [tensors.get(tensor) for tensor in named[name]] for name in stored_matrices(config)}
        known = {id(tensor) for each in matrices.values() for tensor in each}
        return stored_keys(config, matrices, [it for it in tensors.values() if id(it) not in known])

    def held(self, config: Config, shapes: Shapes) -> Collection[str]:
        declared = self._declared(config)
        layouts, merged = hugging_face_layouts(config, declared), declared.merged
        places = places_of(config, shapes)
        tensors = {
            name: [stored_name(tensor, merged) for tensor, _ in tensors_of(layouts[name], places[name], shape)]
            for name, shape in shapes.items()
            if name in layouts
        }
        return [name for name, each in tensors.items() if any(tensor in self._tensors for tensor in each)]

    def leaves(self, config: Config, shapes: Shapes) -> dict[str, Leaf]:
        kernels = stored_kernels(config)
        parts = names_of(nested(kernels))
        needed, shapes = shapes, {name: shape for name, shape in shapes.items() if name not in parts}
        shapes |= {name: kernel.qvalue.shape for name, kernel in kernels.items()}
        places = places_of(config, shapes)
        declared = self._declared(config)
        if self.modules and (problem := module_problem(config, declared.mtp)):
            raise UserError(f"{self.path}: {problem}; give mtp_num_layers=0")
        layouts, merged = layouts_of(config, places, declared), declared.merged
        layers = config.base_num_decoder_layers
        count = config.num_experts if any(it.of_experts for it in layouts.values()) else 1
        if layers * count > len(self._tensors):  # checked now, because layers * count names are generated below
            experts = f" and {count} experts" if count > 1 else ""
            raise UserError(
                f"{self.path}: {len(self._tensors)} tensors, too few for num_hidden_layers={layers}{experts}"
            )
        found = {
            name: (tensor.shape, tensor.dtype.name if tensor.kind in DTYPES else tensor.kind)
            for name, tensor in self._tensors.items()
        }
        parts_of = dict(
            tensor for name, shape in shapes.items() for tensor in tensors_of(layouts[name], places[name], shape)
        )
        wanted = whole_shapes(parts_of, merged)
        head = layouts["decoder/logits_dense/kernel"].name if "decoder/logits_dense/kernel" in layouts else ""
        table = layouts["token_embedder/embedding"].name
        tied = config.logits_via_embedding and head in found and found[head] == found.get(table)
        if tied:
            del found[head]
        copies = {name: layouts[of].name for name, of in hugging_face_copies(config).items()}
        copies = {name: of for name, of in copies.items() if name in found and found[name] == found.get(of)}
        # Some files also contain buffers, which can be computed from config.json.
        found = {
            name: it
            for name, it in found.items()
            if not name.endswith(BUFFER)
            and name not in copies
            and (name in wanted or not self._is_zero_bias(name))
            and not self.in_other_module(config, name)
        }
        check_tensors(found, wanted, str(self.path))
        if tied:
            self._check_copy(
                head, table, f"the configuration ties the head to the embedding table, but {head} and {table} differ"
            )
        for name, of in copies.items():
            self._check_copy(name, of, f"modules of multi-token prediction share {of}, but {name} differs")
        tensors = with_parts(self._tensors, parts_of, merged)
        leaves = dict[str, Leaf]()
        for name, shape in shapes.items():
            where = layouts[name], places[name], shape, head_to_reorder(config, layouts[name], shape)
            if name in kernels:
                leaves |= self._stored(tensors, name, kernels[name], *where)
            else:
                leaves[name] = leaf_of([tensors[it] for it, _ in tensors_of(*where[:3])], *where)
        return {name: leaves[name] for name in needed}

    def in_other_module(self, config: Config, name: str) -> bool:
        """Returns whether a tensor belongs to a multi-token prediction module that `config` lacks. `name`: the tensor's
        name in a text model that is saved alone."""
        return in_other_module(config, self._declared(config).mtp, name, self.modules)

    def _declared(self, config: Config) -> HuggingFace:
        return hugging_face(config, self.keys["decoder_block"])

    def _stored(
        self,
        tensors: Mapping[str, Any],
        name: str,
        kernel: Any,
        layout: Layout,
        where: Place | None,
        shape: tuple[int, ...],
        head: int,
    ) -> dict[str, Leaf]:
        own = [tensors[tensor] for tensor, _ in tensors_of(layout, where, shape)]
        if not all(isinstance(tensor, PackedMatrix) for tensor in own):
            raise UserError(f"{self.path}: {name} is not quantized; give unquantized_modules with its name")
        count = len(own) // len(where.layers) if where else len(own)
        layers = [own[first : first + count] for first in range(0, len(own), count)]
        return stored_leaves(name, kernel, layout, layers, where is not None, head)

    def _is_zero_bias(self, name: str) -> bool:
        """Returns whether a tensor is the zero bias of a GPTQ matrix. AutoGPTQ wrote one for every matrix."""
        module, _, last = name.rpartition(".")
        matrix, bias = self._tensors.get(f"{module}.weight"), self._tensors[name]
        if last != "bias" or not isinstance(matrix, PackedMatrix) or matrix.scheme.layout != "gptq":
            return False
        return bias.kind in DTYPES and bias.shape == matrix.shape[:1] and not bias.read(whole(bias.shape)).any()

    def _check_copy(self, name: str, of: str, otherwise: str) -> None:
        if not is_copy(self._tensors[name], self._tensors[of]):
            raise UserError(f"{self.path}: {otherwise}")


def leaf_of(tensors: Sequence[Values], layout: Layout, where: Place | None, shape: tuple[int, ...], head: int) -> Leaf:
    """Returns the leaf of a canonical parameter with the shape `shape`. The leaf is read layer by layer.

    Args:
      tensors: the tensors in the order of `tensors_of`.
      where: the parameter's position in the stacks; None outside of the stacks.
      head: see `head_to_reorder`.
    """
    stored, mixed = common_dtype([tensor.dtype for tensor in tensors])
    part_shape = shape if where is None else shape[1:]
    count = part_shape[0] if layout.of_experts else 1  # the number of tensors in one layer
    layers = [tensors[first : first + count] for first in range(0, len(tensors), count)]

    def read_box(layer: Sequence[Values], box: Box) -> np.ndarray:
        if not layout.of_experts:
            return _read(layer[0], layout, part_shape, box, head)
        return np.stack([_read(it, layout, part_shape[1:], box[1:], head) for it in layer[box[0]]])

    def put(layer: Sequence[Values], abstract: jax.ShapeDtypeStruct) -> jax.Array:
        def part(box: Box) -> np.ndarray:
            return read_box(layer, box) if where is None else read_box(layer, box[1:])[None]

        return put_slices(part, abstract)

    parts = [functools.partial(read_box, layer, whole(part_shape)) for layer in layers]
    puts = [functools.partial(put, layer) for layer in layers]
    return Leaf(shape, stored, parts, puts, mixed)


def is_copy(one: Values, other: Values) -> bool:
    """Returns whether two tables of the same shape have the same bytes. Reads a few rows of both at a time."""
    rows, columns = one.shape
    boxes = [(slice(row, min(row + _ROWS, rows)), slice(0, columns)) for row in range(0, rows, _ROWS)]
    return all(one.read(box).tobytes() == other.read(box).tobytes() for box in boxes)


def _read(tensor: Values, layout: Layout, shape: tuple[int, ...], box: Box, head: int) -> np.ndarray:
    """Reads `box` of our parameter, which has the shape `shape`, from `tensor`."""
    wide = layout.widened(shape, box, head)
    sizes = tuple(cut.stop - cut.start for cut in wide)
    value = layout.to_ours(tensor.read(layout.box(shape, wide)), sizes, head)
    return value[within(box, wide)]


def layouts_of(
    config: Config, places: Mapping[str, Place | None], declared: HuggingFace | None = None
) -> Mapping[str, Layout]:
    """Returns the layouts of `hugging_face_layouts`, by canonical name. Checks the layouts of the parameters in
    `places`.

    Raises:
      UserError: lists the parameters that have no layout, or whose layout has an invalid tensor name.
    """
    layouts = hugging_face_layouts(config, declared)
    problems = [f"{name}: no Layout" for name in places if name not in layouts]
    for name in places.keys() & layouts.keys():
        if "{}" not in layouts[name].name and places[name] is not None:
            problems.append(f"{name}: {layouts[name].name} has no {{}} for the layer number")
    if problems:
        head = f"decoder_block={config.decoder_block}: Hugging Face layouts:"
        raise UserError("\n  ".join([head, *sorted(problems)]))
    return layouts


def head_to_reorder(config: Config, layout: Layout, shape: tuple[int, ...]) -> int:
    """Returns the size of a head if the tensor stores a head's entries in a different order than our parameter; 0 if
    the order is the same. `shape`: the parameter's shape."""
    return layout.head(config, shape) if config.rope_interleave else 0


def tensors_of(layout: Layout, where: Place | None, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the names and shapes of the Hugging Face tensors of a canonical parameter. `where`: the parameter's
    position in the stacks; None outside of the stacks. `shape`: the parameter's shape."""
    names = [layout.name] if where is None else [layout.name.format(i) for i in where.layers]
    one = shape if where is None else shape[1:]
    if not layout.of_experts:
        return [(name, layout.shape(one)) for name in names]
    return [(name.replace(EXPERT, str(e)), layout.shape(one[1:])) for name in names for e in range(one[0])]
