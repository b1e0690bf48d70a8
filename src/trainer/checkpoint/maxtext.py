"""MaxText's checkpoints: an Orbax tree of another trainer, of which only the parameters are read.

What differs from ours, and is undone (docs/guides/weights.md):
- scanned layers are stacked on axis 1, others lie in decoder/layers_0, decoder/layers_1, ...;
- blocks llama2 and mistral hold 1 / sqrt(head_dim) in the query kernel, unless `use_qk_norm`;
- a head's entries turn as halves or as adjacent pairs, which it decides by the model's name and rope_type.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint import orbax
from trainer.checkpoint.source import LAYERS, Leaf, Shapes, check_tensors, common_dtype
from trainer.config import UserError
from trainer.models.huggingface import family, halves_of_pairs, pairs_of_halves

_TABLE = "token_embedder/embedding"
_QUERY = "decoder/layers/self_attention/query/kernel"


class MaxTextSource:
    """See `Source`. It says none of the model's keys: they are the configuration's."""

    kind = "MaxText"
    keys: Mapping[str, Any] = {}
    neutral: Mapping[str, Any] = {}

    def __init__(self, path: Path):
        """`path`: the folder of the Orbax tree.

        Raises:
          UserError: there are no parameters of a decoder in it.
        """
        self.path = self.tokenizer = path
        headers = orbax.headers(path)
        roots = [name.removesuffix(_TABLE) for name in headers if name.endswith(_TABLE)]
        # Moments of the optimizer have the same names, below opt_state.
        roots = [root for root in roots if set(root.split("/")) <= {"params", ""}]
        if not roots:
            raise UserError(f"{path}: an Orbax checkpoint without params/params/{_TABLE}, so not one of MaxText's")
        self._root = min(roots, key=len)
        self._headers = {
            name.removeprefix(self._root): header for name, header in headers.items() if name.startswith(self._root)
        }

    def notes(self, config: Any) -> Sequence[str]:
        """See `Source.notes`: the order of a head's entries, which the checkpoint does not say."""
        order = "adjacent pairs" if in_pairs(config) else "halves"
        return [
            f"{self.path}: entries of a head are taken to turn as {order}, as MaxText has them with "
            f"model_name={config.model_name} and rope_type={config.rope_type}"
        ]

    def leaves(self, config: Any, shapes: Shapes) -> dict[str, Leaf]:
        """See `Source.leaves`."""
        stored = {name: self._stored(name, shape) for name, shape in shapes.items()}
        found = {name: (tuple(it.shape), np.dtype(it.dtype).name) for name, it in self._headers.items()}
        wanted = {name: shape for tensors in stored.values() for name, shape in tensors.items()}
        check_tensors(found, wanted, str(self.path))
        leaves = {}
        for name, tensors in stored.items():
            dtype, mixed = common_dtype([np.dtype(self._headers[tensor].dtype) for tensor in tensors])
            parts = [functools.partial(self._read, config, name, *tensor) for tensor in tensors.items()]
            leaves[name] = Leaf(shapes[name], dtype, parts, mixed=mixed)
        return leaves

    def _stored(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The tensors, name and shape, of a canonical parameter."""
        if not name.startswith(LAYERS):
            return {name: shape}
        rest = name.removeprefix(LAYERS)
        if f"decoder/layers_0/{rest}" in self._headers:
            # Of more layers than there are tensors one is missing: that many names need not be made to tell.
            layers = min(shape[0], len(self._headers) + 1)
            return {f"decoder/layers_{i}/{rest}": shape[1:] for i in range(layers)}
        return {name: (shape[1], shape[0], *shape[2:])}

    def _read(self, config: Any, name: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
        value = orbax.read(self.path, self._root + tensor, shape, np.dtype(self._headers[tensor].dtype))
        if tensor.startswith(LAYERS):
            value = np.moveaxis(value, 1, 0)
        its_family = family(config.decoder_block)
        layout = its_family.layouts.get(name)
        if layout and layout.turned and in_pairs(config) != config.rope_interleave:
            value = pairs_of_halves(value) if config.rope_interleave else halves_of_pairs(value)
        if name == _QUERY and its_family.maxtext_scales_query and not config.use_qk_norm:
            value = _scaled(value, config.head_dim**0.5)
        return value


def in_pairs(config: Any) -> bool:
    """Whether entries of a head turn as adjacent pairs in MaxText, and not as halves.

    Its models llama3.1-* turn pairs whatever rope_type says, others with rope_type=llama3.1 and, by its default
    rope_interleave=true, with yarn. Its llama3.3-* set no rope_type, as ours do, and so turn halves.
    """
    if config.model_name.startswith("llama3.1"):
        return True
    return config.rope_type == "yarn" or (
        config.rope_type == "llama3.1" and not config.model_name.startswith("llama3.3")
    )


def _scaled(value: np.ndarray, factor: float) -> np.ndarray:
    """`value` times `factor`, rounded once; in float32 it is never there as a whole."""
    result = np.empty(value.shape, value.dtype)
    for part, target in zip(value, result, strict=True):
        target[...] = part.astype(np.float32) * np.float32(factor)
    return result
