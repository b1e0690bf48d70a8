"""MaxText's checkpoints: an Orbax tree of another trainer, of which only the parameters are read.

What differs from ours, and is undone (docs/guides/weights.md):
- scanned layers are stacked on axis 1, others lie in decoder/layers_0, decoder/layers_1, ...;
- blocks llama2 and mistral hold 1 / sqrt(head_dim) in the query kernel, unless `use_qk_norm`;
- a head's entries turn as halves with rope_type=default, as adjacent pairs with llama3.1 and, by its default
  rope_interleave=true, with yarn.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint import orbax
from trainer.checkpoint.source import LAYERS, Leaf, Shapes, check_tensors
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

    def leaves(self, config: Any, shapes: Shapes) -> dict[str, Leaf]:
        """See `Source.leaves`."""
        stored = {name: self._stored(name, shape) for name, shape in shapes.items()}
        found = {name: (tuple(it.shape), np.dtype(it.dtype).name) for name, it in self._headers.items()}
        wanted = {name: shape for tensors in stored.values() for name, shape in tensors.items()}
        check_tensors(found, wanted, str(self.path))
        leaves = {}
        for name, tensors in stored.items():
            dtype = np.dtype(self._headers[next(iter(tensors))].dtype)
            parts = [functools.partial(self._read, config, name, *tensor, dtype) for tensor in tensors.items()]
            leaves[name] = Leaf(shapes[name], dtype, parts)
        return leaves

    def _stored(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The tensors, name and shape, of a canonical parameter."""
        if not name.startswith(LAYERS):
            return {name: shape}
        rest = name.removeprefix(LAYERS)
        if f"decoder/layers_0/{rest}" in self._headers:
            return {f"decoder/layers_{i}/{rest}": shape[1:] for i in range(shape[0])}
        return {name: (shape[1], shape[0], *shape[2:])}

    def _read(self, config: Any, name: str, tensor: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        value = orbax.read(self.path, self._root + tensor, shape, dtype)
        if tensor.startswith(LAYERS):
            value = np.moveaxis(value, 1, 0)
        in_pairs = config.rope_type in ("llama3.1", "yarn")
        layout = family(config.decoder_block).layouts.get(name)
        if layout and layout.turned and in_pairs != config.rope_interleave:
            value = pairs_of_halves(value) if config.rope_interleave else halves_of_pairs(value)
        if name == _QUERY and config.decoder_block in ("llama2", "mistral") and not config.use_qk_norm:
            value = (value.astype(np.float32) * np.float32(config.head_dim**0.5)).astype(dtype)
        return value
