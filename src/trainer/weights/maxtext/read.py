"""Reads MaxText's checkpoints: Orbax trees, of which only the parameters are read.

A MaxText run has the tree in checkpoints/N/items and, next to it, _CHECKPOINT_METADATA and sometimes the position in
the data. In the tree, the parameters are under params/params. MaxText's NNX model writes them at the root instead, each
as {"value": array}. The following differences from our checkpoints are converted (docs/guides/weights.md):
- scanned layers are stacked on axis 1 or, with param_scan_axis=0, on axis 0; other layers are in decoder/layers_0, ...,
  and layers after the last complete repetition of the layer pattern are in decoder/layers_remainder/layers_0, ...;
- some blocks fold the factor on scores into the query kernel, unless `use_qk_norm` is set (`MaxText.scaled_queries`),
  store other parameters multiplied or shifted (`MaxText.stored`), or name layers differently (`MaxText.names`);
- some blocks join parameters in one tensor (`MaxText.joined`), which is read once for each parameter;
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
from trainer.weights.maxtext.stored import Stored, left_over, names_of, stored_as

# A key that this trainer adds to MaxText's custom metadata: whether RoPE rotates adjacent pairs.
PAIRS = "rotary_pairs"
ROOT = "params/params/"
# The paths of router biases in MaxText 0.2.5, where they are not parameters: in a complete state, and in a checkpoint
# of parameters only. The biases' layers are always stacked on axis 0, regardless of param_scan_axis.
_BIASES_OF_STATE, BIASES = "nnx_aux/model/", "params/MoEBiasVar/"
BIAS = "gate/bias"
_TABLE = "token_embedder/embedding"
_FINAL_NORM = "decoder/decoder_norm/"
# The possible locations of parameters: `ROOT`, and those of MaxText's NNX model (with or without its complete state)
# and of post-training.
_ROOTS = (ROOT, "", "model/", "base/", "model_params/")
_AQT = "qrhs"  # in the names of AQT's quantized weights
_VALUE = "/value"
_RANDOM = {"rngs", "dropout"}  # locations of state that is not parameters
UNCHANGED = (1.0, 0.0)
# How to convert a tensor to our parameter: the part to read; the size of the heads to reorder (0: none), and whether to
# reorder them to pairs (see `reordered`); factor and offset (see `conversion`).
_How = tuple[Stored, int, bool, tuple[float, float]]


class MaxTextSource:
    """See `Source`. A MaxText checkpoint contains no model keys: the configuration defines the model."""

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
        # Maps each parameter's name, without the root, to its name in the tree and its header.
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
        self._tree = orbax.Tree(path, dict(self._headers.values()))
        self._said = {
            key: value
            for key, value in orbax.custom_metadata(path).items()
            if key in ("scan_layers", PAIRS) and value in (0, 1)
        }
        self.modules = max(map(module_of, self._headers))

    @property
    def stored(self) -> Mapping[str, str]:
        """Maps each parameter's name, without the tree's root, to its path in the tree. Layers may be stacked or
        separate, as in the tree."""
        return {name: path for name, (path, _) in self._headers.items()}

    def notes(self, config: Config) -> Sequence[str]:
        """See `Source.notes`. Reports the assumed RoPE pairing, which MaxText does not record; contradictions between
        the metadata and the arrays; and multi-token prediction modules that are not read or that differ from ours."""
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
                f"{self.path}: its metadata has scan_layers={not scanned}, but its layers are {layers} and read as such"
            )
        if refused := maxtext(config.decoder_block).refuses(config):
            lines.append(f"warning: {self.path}: MaxText's block computes something else: {'; '.join(refused)}")
        if self.modules and config.mtp_num_layers:
            own = any(is_final_norm(name) for name in self._headers)  # MaxText writes these norms since 0.2.5
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
        """See `Source.held`. Omits the final norm of a multi-token prediction module if the model's norm is read for
        it."""
        return [
            name
            for name, where in places_of(config, shapes).items()
            if not self._shares_norm(name) and any(map(self._headers.__contains__, self._names(config, name, where)))
        ]

    def leaves(self, config: Config, shapes: Shapes) -> dict[str, Leaf]:
        places = places_of(config, shapes)
        axis = self._scan_axis(config, shapes, places)
        names = {name: self._names(config, name, where) for name, where in places.items()}
        stored = {}
        for name, where in places.items():
            single = where is not None and names[name][0] != names_of(config, name, where).stacked
            stored[name] = stored_as(config, name, where, shapes, None if single else self._axis(name, axis))
        self._check(config, names, stored, places)
        if PAIRS not in self._said and is_latent(config) and not in_pairs(config):
            raise UserError(
                f"{self.path}: MaxText's MLA rotates halves with rope_type={config.rope_type}, and scales scores by "
                "rope_factor; our MLA rotates adjacent pairs, as MaxText does with rope_type=yarn, so the model differs"
            )
        heads = heads_to_reorder(config, shapes, self._said.get(PAIRS, in_pairs(config)), str(self.path))
        leaves = {}
        for name, tensors in names.items():
            dtype, mixed = common_dtype([np.dtype(self._headers[tensor][1].dtype) for tensor in tensors])
            how = (stored[name], heads.get(name, 0), config.rope_interleave, conversion(config, name))
            parts = [functools.partial(self._read, how, tensor) for tensor in tensors]
            puts = [functools.partial(self._put, how, tensor) for tensor in tensors]
            leaves[name] = Leaf(shapes[name], dtype, parts, puts, mixed)
        return leaves

    def _check(
        self,
        config: Config,
        names: Mapping[str, Sequence[str]],
        stored: Mapping[str, Stored],
        places: Mapping[str, Place | None],
    ) -> None:
        """Checks that the tensors `names` of each parameter exist, and that no layer is read twice.

        Raises:
          UserError: a layer is read twice; or tensors are missing or unexpected. In the second case, the message also
            lists what MaxText's block does not support.
        """
        in_stacks = [(tensor, stored[name]) for name, tensors in names.items() if places[name] for tensor in tensors]
        if len(set(in_stacks)) < len(in_stacks):
            raise UserError(
                f"{self.path}: MaxText's block {config.decoder_block} has another pattern of layers: two layers of "
                "this configuration would be read from the same tensors"
            )
        found = {
            name: (tuple(it.shape), np.dtype(it.dtype).name)
            for name, (_, it) in self._headers.items()
            if module_of(name) <= config.mtp_num_layers
        }
        wanted = {tensor: stored[name].shape for name, tensors in names.items() for tensor in tensors}
        try:
            check_tensors(found, wanted, str(self.path))
        except UserError as error:
            why = maxtext(config.decoder_block).refuses(config)
            raise UserError("\n  ".join([str(error), *(f"MaxText's block: {it}" for it in why)])) from None

    def _scan_axis(self, config: Config, shapes: Shapes, places: Mapping[str, Place | None]) -> int:
        """Returns the axis on which layers are stacked.

        Raises:
          UserError: the axis is ambiguous: every array has the same shape for either axis.
        """
        fits = []  # for each stacked tensor, whether it has the shape for axis 0, and for axis 1
        for name, where in places.items():
            tensor = names_of(config, name, where).stacked if where and not left_over(where) else ""
            if tensor in self._headers and tensor not in self._biases:
                shape = tuple(self._headers[tensor][1].shape)
                fits.append([stored_as(config, name, where, shapes, axis).shape == shape for axis in (0, 1)])
        if fits and all(map(all, fits)):
            raise UserError(
                f"{self.path}: every parameter's first axis is as long as the number of layers, so the "
                "shapes do not tell whether param_scan_axis is 0 or 1; have MaxText write it with scan_layers=false"
            )
        return 0 if sum(zero for zero, _ in fits) > sum(one for _, one in fits) else 1

    def _shares_norm(self, name: str) -> bool:
        """Returns whether `name` is the final norm of a multi-token prediction module that uses the model's norm, as
        before MaxText 0.2.5."""
        return is_final_norm(name) and name not in self._headers

    def _axis(self, name: str, axis: int) -> int:
        return 0 if name in self._biases else axis

    def _names(self, config: Config, name: str, where: Place | None) -> Sequence[str]:
        """Returns the names of a canonical parameter's tensors: one name for all layers, or one name per layer."""
        if where is None:
            return [_FINAL_NORM + name.rpartition("/")[2] if self._shares_norm(name) else name]
        # If there are more layers than tensors, a tensor is missing; this many names suffice to detect it.
        few = where._replace(layers=where.layers[: len(self._headers) + 1])
        named = names_of(config, name, few)
        return named.each if named.each[0] in self._headers else [named.stacked]

    def _read(self, how: _How, tensor: str) -> np.ndarray:
        stored, head, pairs, (factor, offset) = how
        path, _ = self._headers[tensor]
        value = stored.view(self._tree.read(path))
        value = value.reshape(*([stored.layers] if stored.layers else []), *stored.layer)
        value = reordered(value, head, pairs=pairs)
        if (factor, offset) == UNCHANGED:
            return value
        return (value.astype(np.float32) - np.float32(offset)) * np.float32(factor)

    def _put(self, how: _How, tensor: str, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        """Does the same as `_read`, but reads the tensor onto the devices and converts it there. Each process reads
        only its devices' slices."""
        stored, head, _, changed = how
        path, header = self._headers[tensor]
        sharding = resharded(abstract.sharding, len(abstract.shape), stored.spec)
        dtype = abstract.dtype if changed == UNCHANGED else np.dtype(header.dtype)  # converted before it is rounded
        value = self._tree.place(path, jax.ShapeDtypeStruct(stored.shape, dtype, sharding=sharding))
        if not stored.is_ours or head or changed != UNCHANGED:
            value = _to_ours(value, how, abstract.shape, abstract.dtype)
        return jax.device_put(value, abstract.sharding)


@functools.partial(jax.jit, static_argnames=("how", "shape", "dtype"))
def _to_ours(value: jax.Array, how: _How, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    stored, head, pairs, (factor, offset) = how
    value = reordered(stored.view(value).reshape(shape), head, pairs=pairs)
    return (value if (factor, offset) == UNCHANGED else (value.astype(jnp.float32) - offset) * factor).astype(dtype)


def _not_maxtexts(headers: Mapping[str, Any]) -> str:
    """Returns why an Orbax tree is refused."""
    if f"params/{_TABLE}" in headers:
        return (
            "a part of a checkpoint of this trainer, not of MaxText; give the run's folder, its checkpoints/N, or the "
            "folder that trainer.export wrote"
        )
    return f"an Orbax checkpoint without {ROOT}{_TABLE}, or {_TABLE} with or without {_VALUE}: not a MaxText checkpoint"


def in_pairs(config: Config) -> bool:
    """Returns whether MaxText rotates a head's entries as adjacent pairs, not as halves.

    MaxText's models llama3.1-*, and the models of some blocks (`MaxText.pairs`), rotate pairs under every rope_type.
    Other models rotate pairs with rope_type=llama3.1 and, because rope_interleave=true is the default, with yarn.
    MaxText's llama3.3-* set no rope_type, in contrast to our preset, so they rotate halves.
    """
    if config.model_name.startswith("llama3.1") or maxtext(config.decoder_block).pairs:
        return True
    return (config.rope_type == "yarn" and maxtext(config.decoder_block).interleaves) or (
        config.rope_type == "llama3.1" and not config.model_name.startswith("llama3.3")
    )


def heads_to_reorder(config: Config, shapes: Shapes, pairs: bool, where: str) -> Mapping[str, int]:
    """Returns the parameters in `shapes` whose heads must be reordered, each with the size of a head. `pairs`: whether
    MaxText rotates adjacent pairs.

    Raises:
      UserError: the family does not declare the parameters whose heads RoPE rotates.
    """
    if pairs == config.rope_interleave:
        return {}
    why = (
        f"{where}: MaxText rotates {'adjacent pairs' if pairs else 'halves'}, but "
        f"rope_interleave={config.rope_interleave} is set"
    )
    return rotated_heads(config, shapes, why)


def conversion(config: Config, name: str) -> tuple[float, float]:
    """Returns (factor, offset): MaxText stores the canonical parameter `name` as parameter / factor + offset."""
    there, name = maxtext(config.decoder_block), decoder_name(config, name)
    if there.scaled_queries and name.endswith(there.scaled_queries) and not config.use_qk_norm:
        return (config.query_pre_attn_scalar or config.head_dim) ** 0.5, 0.0
    return there.stored(config, name)
