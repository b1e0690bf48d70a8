"""Reads MaxText's checkpoints: Orbax trees, of which only the parameters are read.

A MaxText run has the tree in checkpoints/N/items, _CHECKPOINT_METADATA next to it, and sometimes the position in the
data. In the tree, the parameters are under params/params. MaxText's NNX model writes them at the root instead, each as
{"value": array}. These differences from our checkpoints are converted (docs/guides/weights.md):
- scanned layers are stacked on axis 1 or, with param_scan_axis=0, on axis 0; other layers are in decoder/layers_0, ...,
  and layers after the whole repetitions of a pattern are in decoder/layers_remainder/layers_0, ...;
- some blocks fold the factor on scores into the query kernel, unless `use_qk_norm` (`MaxText.scaled_queries`), store
  other parameters multiplied or shifted (`MaxText.stored`), or name layers differently (`MaxText.names`);
- RoPE rotates a head's entries as halves or as adjacent pairs, depending on the model's name and rope_type.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config.capabilities.latent_keys import is_latent
from trainer.config.effects import no_effect_of
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.leaves import orbax
from trainer.leaves.source import Leaf, Shapes, check_tensors, common_dtype, resharded
from trainer.models.families import Place, maxtext, places_of, stacks
from trainer.models.huggingface import reordered
from trainer.models.mtp_names import decoder_name, is_final_norm, module_of, rotated_heads
from trainer.models.patterns import LAYERS, REMAINDER
from trainer.weights.about_files import about_in

# Keys of the custom metadata: MaxText's, and one that this trainer adds, for whether RoPE rotates adjacent pairs.
PAIRS = "rotary_pairs"
ROOT = "params/params/"
# The places of router biases in MaxText 0.2.5, where they are not parameters: in a complete state, and in parameters
# alone. The biases' layers are always stacked on axis 0, regardless of param_scan_axis.
_BIASES_OF_STATE, BIASES = "nnx_aux/model/", "params/MoEBiasVar/"
BIAS = "gate/bias"
_TABLE = "token_embedder/embedding"
_FINAL_NORM = "decoder/decoder_norm/"
# Other locations of parameters: of MaxText's NNX model, with or without its complete state, or of post-training.
_ROOTS = (ROOT, "", "model/", "base/", "model_params/")
_AQT = "qrhs"  # in the names of AQT's quantized weights
_VALUE = "/value"
_RANDOM = {"rngs", "dropout"}  # locations of state that is not parameters
UNCHANGED = (1.0, 0.0)
# How to convert a tensor to ours: the axis of layers, or -1 for a single layer; the number of entries of heads to
# reorder, and whether to reorder to pairs (`reordered`); factor and offset, see `conversion`.
_How = tuple[int, int, bool, tuple[float, float]]


class MaxTextSource:
    """See `Source`. It has no model keys: the configuration defines the model."""

    kind = "MaxText"
    keys: Mapping[str, Any] = {}
    length: int | None = None
    averaged = False

    def __init__(self, path: Path, tokenizer: Path):
        """`path`: the folder of the Orbax tree; `tokenizer`: a folder that may contain tokenizer files.

        Raises:
          UserError: the tree contains no parameters of a decoder.
        """
        self.path, self.tokenizer = path, tokenizer
        self.about = about_in(tokenizer)
        headers = orbax.headers(path)
        if any(_AQT in name.split("/") for name in headers):
            raise UserError(
                f"{path}: its weights are quantized by AQT, whose checkpoints are not read; quantize the float "
                "checkpoint that it was made from with python -m trainer.quantize"
            )
        ends = ("", _VALUE)
        found = [(root, end) for root in _ROOTS for end in ends if root + _TABLE + end in headers]
        if not found:
            raise UserError(f"{path}: {_not_maxtexts(headers)}")
        root, end = found[0]
        # For each parameter, its name in the tree and its header.
        self._headers = {
            name.removeprefix(root).removesuffix(end): (name, header)
            for name, header in headers.items()
            if name.startswith(root) and name.endswith(end) and not _RANDOM.intersection(name.split("/"))
        }
        biases = {
            name.removeprefix(root): (name, header)
            for root in (_BIASES_OF_STATE, BIASES)
            for name, header in headers.items()
            if name.startswith(root) and name.endswith(BIAS)
        }
        self._biases = biases.keys() - self._headers.keys()
        self._headers = biases | self._headers
        self._said = {
            key: value
            for key, value in orbax.custom_metadata(path).items()
            if key in ("scan_layers", PAIRS) and value in (0, 1)
        }
        self.modules = max(map(module_of, self._headers))

    @property
    def stored(self) -> Mapping[str, str]:
        """Each parameter's path in the tree, by its name without the tree's root. Layers are as stored."""
        return {name: path for name, (path, _) in self._headers.items()}

    def notes(self, config: Config) -> Sequence[str]:
        """See `Source.notes`. Reports the assumed RoPE pairing, which MaxText does not record; contradictions between
        the metadata and the arrays; and modules that are not read."""
        lines = []
        if PAIRS not in self._said and not no_effect_of(config, "rope_interleave"):
            order = "adjacent pairs" if in_pairs(config) else "halves"
            lines.append(
                f"{self.path}: RoPE is assumed to rotate a head's entries as {order}, like MaxText with "
                f"model_name={config.model_name} and rope_type={config.rope_type}"
            )
        single = tuple(f"decoder/{LAYERS if it.name == REMAINDER else it.name}_0/" for it in stacks(config))
        scanned = not any(name.startswith(single) for name in self._headers)
        if self._said.get("scan_layers", scanned) != scanned:
            layers = "stacked" if scanned else "stored one by one"
            lines.append(
                f"{self.path}: its metadata say scan_layers={not scanned}, but its layers are {layers}, and are read so"
            )
        if refused := maxtext(config.decoder_block).refuses(config):
            lines.append(f"warning: {self.path}: MaxText's block computes something else: {'; '.join(refused)}")
        if self.modules and config.mtp_num_layers:
            own = any(is_final_norm(name) for name in self._headers)  # since 0.2.5
            norm = "" if own else " and end with the model's norm"
            copy = "" if own else " and end with their own norm, which starts as a copy"
            lines.append(
                f"warning: {self.path}: MaxText's modules of multi-token prediction read hidden states before the "
                f"final norm{norm}; here they read them after it{copy}: their loss differs at first"
            )
        if self.modules > config.mtp_num_layers:
            left = ", ".join(str(k) for k in range(config.mtp_num_layers + 1, self.modules + 1))
            lines.append(
                f"{self.path}: its modules of multi-token prediction are left out: {left}; "
                f"mtp_num_layers={self.modules} loads them"
            )
        return lines

    def held(self, config: Config, shapes: Shapes) -> Collection[str]:
        """See `Source.held`. The model's norm does not count where it is read as a module's final norm."""
        of = places_of(config, shapes)
        stored = {name: self._stored(config, name, shape, of[name], 1) for name, shape in shapes.items()}
        return [
            name
            for name, tensors in stored.items()
            if not self._shares_norm(name) and not tensors.keys().isdisjoint(self._headers)
        ]

    def leaves(self, config: Config, shapes: Shapes) -> dict[str, Leaf]:
        """See `Source.leaves`."""
        places = places_of(config, shapes)
        axis = self._scan_axis(
            {
                names_of(config, name, where)[0]: shapes[name]
                for name, where in places.items()
                if where and not left_over(where)
            }
        )
        stored = {name: self._stored(config, name, shape, places[name], axis) for name, shape in shapes.items()}
        found = {
            name: (tuple(it.shape), np.dtype(it.dtype).name)
            for name, (_, it) in self._headers.items()
            if module_of(name) <= config.mtp_num_layers
        }
        wanted = {name: shape for tensors in stored.values() for name, shape in tensors.items()}
        in_stacks = [tensor for name, tensors in stored.items() if places[name] for tensor in tensors]
        if len(set(in_stacks)) < len(in_stacks):
            raise UserError(
                f"{self.path}: MaxText's block {config.decoder_block} has another pattern of layers: two layers of "
                "this configuration would be read from the same tensors"
            )
        check_tensors(found, wanted, str(self.path))
        if PAIRS not in self._said and is_latent(config) and not in_pairs(config):
            raise UserError(
                f"{self.path}: MaxText's MLA rotates halves with rope_type={config.rope_type}, and scales scores by "
                "rope_factor; here it rotates adjacent pairs, as MaxText does with rope_type=yarn: another model"
            )
        heads = heads_to_reorder(config, shapes, self._said.get(PAIRS, in_pairs(config)), str(self.path))
        leaves = {}
        for name, tensors in stored.items():
            dtype, mixed = common_dtype([np.dtype(self._headers[tensor][1].dtype) for tensor in tensors])
            where = places[name]
            # The axis of the layers; -1 if a tensor contains a single layer.
            stacked = where is not None and not left_over(where) and names_of(config, name, where)[0] in tensors
            on = self._axis(name, axis) if stacked else 0 if where is None else -1
            how = (on, heads.get(name, 0), config.rope_interleave, conversion(config, name))
            parts = [functools.partial(self._read, how, *tensor) for tensor in tensors.items()]
            puts = [functools.partial(self._put, how, *tensor) for tensor in tensors.items()]
            leaves[name] = Leaf(shapes[name], dtype, parts, puts, mixed)
        return leaves

    def _scan_axis(self, shapes: Shapes) -> int:
        """Returns the axis on which layers are stacked. `shapes`: the shapes of the stacks' parameters.

        Raises:
          UserError: the axis is ambiguous: every array has the same shape for either axis.
        """
        stacked = {name: shape for name, shape in shapes.items() if name in self._headers.keys() - self._biases}
        fits = [
            sum(tuple(self._headers[name][1].shape) == _with_layers_on(axis, shape) for name, shape in stacked.items())
            for axis in (0, 1)
        ]
        if stacked and fits == [len(stacked)] * 2:
            raise UserError(
                f"{self.path}: every parameter's first axis is as long as the number of layers, so the "
                "shapes do not tell whether param_scan_axis is 0 or 1; have MaxText write it with scan_layers=false"
            )
        return 0 if fits[0] > fits[1] else 1

    def _shares_norm(self, name: str) -> bool:
        """Returns whether `name` is the final norm of a module that shares the model's, as before MaxText 0.2.5."""
        return is_final_norm(name) and name not in self._headers

    def _axis(self, name: str, axis: int) -> int:
        return 0 if name in self._biases else axis

    def _stored(
        self, config: Config, name: str, shape: tuple[int, ...], where: Place | None, axis: int
    ) -> dict[str, tuple[int, ...]]:
        """Returns name and shape of the tensors of a canonical parameter."""
        if where is None:
            return {_FINAL_NORM + name.rpartition("/")[2] if self._shares_norm(name) else name: shape}
        # With more layers than tensors, one is missing. This is detected without generating that many names.
        few = where._replace(layers=where.layers[: len(self._headers) + 1])
        stacked, each = names_of(config, name, few)
        if each[0] in self._headers or left_over(where):
            return dict.fromkeys(each if each[0] in self._headers else [stacked], shape[1:])
        return {stacked: _with_layers_on(self._axis(name, axis), shape)}

    def _read(self, how: _How, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
        axis, head, pairs, (factor, offset) = how
        stored, header = self._headers[tensor]
        value = orbax.read(self.path, stored, shape, np.dtype(header.dtype))
        if axis >= 0:
            value = np.moveaxis(value, axis, 0)
        value = reordered(value, head, pairs=pairs)
        if (factor, offset) == UNCHANGED:
            return value
        return (value.astype(np.float32) - np.float32(offset)) * np.float32(factor)

    def _put(self, how: _How, tensor: str, shape: tuple[int, ...], abstract: jax.ShapeDtypeStruct) -> jax.Array:
        """Does the same as `_read` on devices, which also convert the tensor. Each process reads its devices'
        slices."""
        axis, head, _, changed = how
        stored, header = self._headers[tensor]

        def theirs(ours: list[Any]) -> list[Any]:
            return ours[1:] if axis < 0 else list(_with_layers_on(axis, tuple(ours)))

        sharding = resharded(abstract.sharding, len(abstract.shape), theirs)
        dtype = abstract.dtype if changed == UNCHANGED else np.dtype(header.dtype)  # converted before rounding
        value = orbax.place(self.path, stored, jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
        if axis != 0 or head or changed != UNCHANGED:
            value = _to_ours(value, how, abstract.dtype)
        return jax.device_put(value, abstract.sharding)


@functools.partial(jax.jit, static_argnames=("how", "dtype"))
def _to_ours(value: jax.Array, how: _How, dtype: Any) -> jax.Array:
    axis, head, pairs, (factor, offset) = how
    value = value[None] if axis < 0 else jnp.moveaxis(value, axis, 0)
    value = reordered(value, head, pairs=pairs)
    return (value if (factor, offset) == UNCHANGED else (value.astype(jnp.float32) - offset) * factor).astype(dtype)


def _not_maxtexts(headers: Mapping[str, Any]) -> str:
    """Returns why an Orbax tree is refused."""
    if f"params/{_TABLE}" in headers:
        return (
            "a part of a checkpoint of this trainer, not of MaxText; give the run's folder, its checkpoints/N, or the "
            "folder that trainer.export wrote"
        )
    return f"an Orbax checkpoint without {ROOT}{_TABLE}, or {_TABLE} with or without {_VALUE}: not a MaxText checkpoint"


def _with_layers_on(axis: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[1 : axis + 1], shape[0], *shape[axis + 1 :])


def left_over(where: Place) -> bool:
    """Returns whether the layers follow the complete repetitions of a pattern. MaxText does not stack such layers."""
    return where.stack == REMAINDER


def names_of(config: Config, name: str, where: Place) -> tuple[str, list[str]]:
    """Returns MaxText's name of a canonical parameter's stacked array, and of each layer if the layers are not
    scanned."""
    if own := maxtext(config.decoder_block).names:
        return own(name, where)
    each = [layer_name(where, i) for i in range(len(where.layers))]
    if left_over(where):
        name = f"decoder/{REMAINDER}/layers_{where.layers[0] - where.first}/{where.path}"
    return name, each


def layer_name(where: Place, index: int) -> str:
    """Returns MaxText's name for layer number `index` of a parameter whose layers are not scanned."""
    if left_over(where):
        return f"decoder/{LAYERS}_{where.layers[index]}/{where.path}"
    return f"decoder/{where.stack}_{where.layers[index] - where.first}/{where.path}"


def in_pairs(config: Config) -> bool:
    """Returns whether MaxText rotates a head's entries as adjacent pairs, not as halves.

    Its models llama3.1-*, and the models of some blocks (`MaxText.pairs`), rotate pairs under every rope_type. Other
    models rotate pairs with rope_type=llama3.1 and, because of the default rope_interleave=true, with yarn. llama3.3-*
    set no rope_type, as in our presets, so they rotate halves.
    """
    if config.model_name.startswith("llama3.1") or maxtext(config.decoder_block).pairs:
        return True
    return (config.rope_type == "yarn" and maxtext(config.decoder_block).interleaves) or (
        config.rope_type == "llama3.1" and not config.model_name.startswith("llama3.3")
    )


def heads_to_reorder(config: Config, shapes: Shapes, pairs: bool, where: str) -> Mapping[str, int]:
    """Returns the parameters in `shapes` whose heads must be reordered, each with the size of a head. `pairs`: whether
    MaxText rotates pairs.

    Raises:
      UserError: the family does not declare which parameters these are.
    """
    if pairs == config.rope_interleave:
        return {}
    why = (
        f"{where}: MaxText rotates {'adjacent pairs' if pairs else 'halves'}, and "
        f"rope_interleave={config.rope_interleave} is set"
    )
    return rotated_heads(config, shapes, why)


def conversion(config: Config, name: str) -> tuple[float, float]:
    """Returns (factor, offset): MaxText stores the canonical parameter `name` as parameter / factor + offset."""
    there, name = maxtext(config.decoder_block), decoder_name(config, name)
    if there.scaled_queries and name.endswith(there.scaled_queries) and not config.use_qk_norm:
        return (config.query_pre_attn_scalar or config.head_dim) ** 0.5, 0.0
    return there.stored(config, name)
