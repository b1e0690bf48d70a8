"""Parameters in this trainer's format: an Orbax tree, config.yml and the tokenizer's files.

They are read from a run's checkpoint (see `trainer.checkpoint.manager`), or from a folder that `trainer.export` wrote.
Such a folder contains
  checkpoint/   an Orbax v1 checkpoint of {"params": canonical nested dict} and, for a model with state that is not
                trained by gradients (biases of routers), "rest" of the same form; other items of a checkpoint are not
                read
  config.yml    the model's keys, see `model_keys.model_yaml`
  huggingface.json, generation_config.json    optional, see `trainer.leaves.about`
"""

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.leaves import orbax
from trainer.leaves.about import LONGEST
from trainer.leaves.source import Leaf, Shapes, check_tensors, names_of, nested
from trainer.models import FAMILIES
from trainer.models.huggingface import reordered
from trainer.models.mtp_names import module_of, rotated_heads
from trainer.optim.average import AVERAGE
from trainer.state.diloco import mean_of_islands
from trainer.weights.about_files import about_in
from trainer.weights.masks import masks_of
from trainer.weights.model_keys import read_model_yaml
from trainer.weights.stored import as_floats, stored_kernels, with_storage

TREE = "checkpoint"
CONFIG = "config.yml"
ROOT, REST = "params/", "rest/"
_ISLANDS = f"inner_state/{REST}"  # with DiLoCo: the arrays of all islands, stacked on the first axis
_AVERAGES = f"{AVERAGE}/"
_mean = jax.jit(mean_of_islands)
_reordered = jax.jit(reordered, static_argnames=("head", "pairs"))


class ParamsSource:
    """See `Source`."""

    kind = "trainer"

    def __init__(
        self, path: Path, tree: str = TREE, config: str = CONFIG, tokenizer: str = "", *, average: bool = False
    ):
        """`tree`, `config`, `tokenizer`: paths in the folder `path`. `average`: whether to read averages in place of
        the parameters that have an average.

        Raises:
          UserError: the checkpoint is damaged, or has no averages although `average` is true.
        """
        self.path, self.tokenizer = path, path / tokenizer
        self.keys: Mapping[str, Any]
        self.keys, length = read_model_yaml(path / config)
        self.about, self.lacks = about_in(self.tokenizer), ""  # `lacks`: a line about data missing from an old run
        if length is not None and self.keys["rope_type"] == "default":
            self.about = self.about._replace(fields={LONGEST: length, **self.about.fields})
        self._tree = path / tree
        self._headers = orbax.headers(self._tree)
        self.length = length
        self.averaged = any(path.startswith(_AVERAGES) for path in self._headers)
        roots = (_AVERAGES, ROOT, REST, _ISLANDS) if average else (ROOT, REST, _ISLANDS)
        # The path of each weight in the tree. Averages take precedence; frozen parameters have no averages.
        self._paths = {
            path.removeprefix(root): path for root in reversed(roots) for path in self._headers if path.startswith(root)
        }
        self._stored = orbax.Tree(self._tree, {path: self._headers[path] for path in self._paths.values()})
        if average and not self.averaged:
            raise UserError(f"{path}: contains no averaged parameters: it was trained with ema_decay=0")

    def notes(self, config: Config) -> Sequence[str]:
        as_floats = self.keys.get("checkpoint_is_quantized") and not config.checkpoint_is_quantized
        stored = f"{self.path}: weights are stored in {self.keys.get('quantization')}; they are read as float32"
        return [*filter(None, [self.lacks]), *([stored] if as_floats else ())]

    def held(self, config: Config, shapes: Shapes) -> Collection[str]:
        whole = {name for path in self._paths for name in itertools.accumulate(path.split("/"), "{}/{}".format)}
        return shapes.keys() & whole

    def leaves(self, config: Config, shapes: Shapes) -> dict[str, Leaf]:
        if self.keys.get("checkpoint_is_quantized") and not config.checkpoint_is_quantized:
            stored = with_storage(config, self.keys)
            kernels = {name: kernel for name, kernel in stored_kernels(stored).items() if name in shapes}
            parts = {part: leaf.shape for part, leaf in names_of(nested(kernels)).items()}
            whole = {name: shape for name, shape in shapes.items() if name not in kernels}
            leaves = self._leaves(config, whole | parts, self._heads(config, whole))
            heads = self._heads(config, {name: shapes[name] for name in kernels})
            found = as_floats(config, kernels, leaves, heads)
            return {name: found[name] for name in shapes}
        kernels = stored_kernels(config)
        if kernels and self.keys["rope_interleave"] != config.rope_interleave:
            raise UserError(
                f"{self.path}: saved with rope_interleave={self.keys['rope_interleave']}: "
                "quantized weights cannot be reordered; give "
                f"rope_interleave={self.keys['rope_interleave']}, or checkpoint_is_quantized=false"
            )
        return self._leaves(config, shapes, self._heads(config, shapes))

    def _leaves(self, config: Config, shapes: Shapes, heads: Mapping[str, int]) -> dict[str, Leaf]:
        headers = {name: self._headers[path] for name, path in self._paths.items()}
        found = {
            name: (tuple(header.shape)[self._of_islands(name) :], np.dtype(header.dtype).name)
            for name, header in headers.items()
            if module_of(name) <= config.mtp_num_layers
        }
        # All dtypes are allowed here, because the parts of a quantized parameter differ in dtype; `load_parameters`
        # compares dtypes.
        check_tensors(found, shapes, str(self.path), {dtype for _, dtype in found.values()})
        return {
            name: self._leaf(name, shape, heads.get(name, 0), config.rope_interleave) for name, shape in shapes.items()
        }

    def _heads(self, config: Config, shapes: Shapes) -> dict[str, int]:
        """Returns the weights in `shapes` whose heads must be reordered, each with the number of entries of a head."""
        if self.keys["rope_interleave"] == config.rope_interleave:
            return {}
        masks = masks_of(config)
        why = (
            f"{self.path}: saved with rope_interleave={self.keys['rope_interleave']}, but "
            f"rope_interleave={config.rope_interleave} is given"
        )
        trained = self.keys["decoder_block"]
        others = {name: shape for name, shape in shapes.items() if name not in masks}
        heads = rotated_heads(config, others, why, trained if trained in FAMILIES else "")
        return heads | {mask: heads[kernel] for mask, kernel in masks.items() if kernel in heads}

    def _of_islands(self, name: str) -> bool:
        """Whether `name` is stored for all islands, stacked on the first axis."""
        return self._paths[name].startswith(_ISLANDS)

    def _leaf(self, name: str, shape: tuple[int, ...], head: int, pairs: bool) -> Leaf:
        path = self._paths[name]
        dtype = np.dtype(self._headers[path].dtype)
        read = functools.partial(self._stored.read, path)
        if self._of_islands(name):

            def mean() -> np.ndarray:
                return np.asarray(_mean(read()))

            return Leaf(shape, dtype, [mean], [lambda abstract: jax.device_put(mean(), abstract.sharding)])
        place = functools.partial(self._stored.place, path)
        if not head:
            return Leaf(shape, dtype, [read], [place])
        return Leaf(
            shape,
            dtype,
            [lambda: reordered(read(), head, pairs=pairs)],
            [lambda abstract: jax.device_put(_reordered(place(abstract), head, pairs=pairs), abstract.sharding)],
        )
