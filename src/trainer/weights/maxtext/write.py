"""Writes parameters for MaxText's load_parameters_path: the inverse of `trainer.weights.maxtext.read`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from trainer.config.capabilities.latent_keys import is_latent
from trainer.config.keys import Config
from trainer.leaves import orbax
from trainer.leaves.orbax import ITEMS
from trainer.leaves.source import Leaf, Shapes, Tick, common_dtype, progress
from trainer.models.families import Place, maxtext, places_of
from trainer.models.huggingface import reordered
from trainer.weights.maxtext.model_arguments import maxtext_keys
from trainer.weights.maxtext.read import (
    BIAS,
    BIASES,
    PAIRS,
    ROOT,
    UNCHANGED,
    conversion,
    heads_to_reorder,
)
from trainer.weights.maxtext.stored import names_of, stored_as
from trainer.weights.params.write import target_dtypes

STEP = "0"  # the folder name of the single checkpoint that is written
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_COMMITTED = "commit_success.txt"


def write_maxtext(folder: Path, config: Config, leaves: Mapping[str, Leaf], dtype: str | None, scan: bool) -> None:
    """Writes `leaves` to `folder`/0/items, one MaxText tensor after the other. `folder` must exist and be empty.

    Args:
      config: the resolved configuration, which determines the RoPE pairing.
      dtype: see `params.write.write_params`.
      scan: whether to stack layers on axis 1, as MaxText does with scan_layers=true and its default param_scan_axis.

    Raises:
      UserError: MaxText cannot compute this model (see `maxtext_keys`), or the error of `target_dtypes`.
    """
    maxtext_keys(config)
    targets = target_dtypes(leaves, dtype)
    # The files must match the rope_type and rope_interleave of `maxtext_keys`, which determine the RoPE pairing.
    pairs = config.rope_type != "default" or is_latent(config)
    pairs &= config.rope_type != "yarn" or maxtext(config.decoder_block).interleaves
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    heads = heads_to_reorder(config, shapes, pairs, "format=maxtext")
    step = folder / STEP
    with orbax.writer(step, {"scan_layers": scan, PAIRS: pairs}) as write, progress(leaves.values(), "writing") as tick:
        for group in _groups(config, leaves, scan):
            arrays = dict[str, np.ndarray]()
            target, _ = common_dtype([targets[name] for name in group])
            for name, leaf in group.items():
                _store(arrays, config, name, leaf, shapes, target, scan, heads.get(name, 0), tick)
            write(arrays)
    _as_maxtext_has_it(step)


def _groups(config: Config, leaves: Mapping[str, Leaf], scan: bool) -> list[dict[str, Leaf]]:
    """Returns `leaves`, grouped by the tensors that contain them."""
    groups = dict[str, dict[str, Leaf]]()
    for name, where in places_of(config, leaves).items():
        groups.setdefault(_names(config, name, where, scan)[0], {})[name] = leaves[name]
    return list(groups.values())


def _names(config: Config, name: str, where: Place | None, scan: bool) -> Sequence[str]:
    """Returns the names of a canonical parameter's tensors: one name for all layers, or one name per layer."""
    if where is None:
        return [name]
    named = names_of(config, name, where)
    return [named.stacked] if scan else named.each


def _store(
    arrays: dict[str, np.ndarray],
    config: Config,
    name: str,
    leaf: Leaf,
    shapes: Shapes,
    dtype: np.dtype,
    scan: bool,
    head: int,
    tick: Tick,
) -> None:
    """Writes one canonical parameter into `arrays`, which maps paths to MaxText's arrays. Adds missing arrays."""
    factor, offset = conversion(config, name)

    def theirs(value: np.ndarray) -> np.ndarray:
        value = reordered(value, head, pairs=not config.rope_interleave)
        if (factor, offset) != UNCHANGED:
            value = value.astype(np.float32) / np.float32(factor) + np.float32(offset)
        return value.astype(dtype, copy=False)

    where = places_of(config, [name])[name]
    names = _names(config, name, where, scan)
    if where is None:
        arrays[ROOT + name] = theirs(leaf.read(leaf.dtype, tick))
        return
    stored = stored_as(config, name, where, shapes, 1 if scan else None)
    for i, layer in enumerate(leaf.layers(tick)):
        path = ROOT + names[0 if stored.layers else i]
        if path not in arrays:
            arrays[path] = np.empty(stored.shape, dtype)
        part = stored.view(arrays[path])
        part = part[i : i + 1] if stored.layers else part
        part[...] = theirs(layer).reshape(part.shape)
    if stored.layers and name.endswith(BIAS):
        # MaxText 0.2.5 has router biases in another collection, with layers on axis 0.
        arrays[BIASES + name] = np.moveaxis(arrays[ROOT + names[0]], 1, 0)


def _as_maxtext_has_it(step: Path) -> None:
    """Converts an Orbax v1 checkpoint to the names and files of Orbax v0, which MaxText uses."""
    (step / "state").rename(step / ITEMS)
    (step / "orbax.checkpoint").unlink()
    for folder in (step, step / ITEMS):
        (folder / _COMMITTED).touch()  # marks a complete checkpoint, in case it is copied to a bucket
    file = step / orbax.COMPOSITE
    metadata = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(metadata | {"item_handlers": {ITEMS: _HANDLER}}), encoding="utf-8")
