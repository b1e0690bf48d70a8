"""Writes parameters for MaxText's load_parameters_path: the inverse of `read`."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trainer.config.capabilities.latent_keys import is_latent
from trainer.config.keys import Config
from trainer.leaves import orbax
from trainer.leaves.orbax import ITEMS
from trainer.leaves.source import Leaf, Tick, progress
from trainer.models.families import maxtext, place, stacks
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
    left_over,
    names_of,
)
from trainer.weights.params.write import target_dtypes

STEP = "0"  # the folder name of the single checkpoint that is written
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_COMMITTED = "commit_success.txt"


def write_maxtext(folder: Path, config: Config, leaves: Mapping[str, Leaf], dtype: str | None, scan: bool) -> None:
    """Writes `leaves` one by one to `folder`/0/items. `folder` must exist and be empty.

    Args:
      config: resolved; determines the RoPE pairing.
      dtype: see `params.write.write_params`.
      scan: whether to stack layers on axis 1, as MaxText does with scan_layers=true and its default param_scan_axis.

    Raises:
      UserError: MaxText cannot compute this model (see `maxtext_keys`), or the error of `target_dtypes`.
    """
    maxtext_keys(config)
    targets = target_dtypes(leaves, dtype)
    # The files match the keys of `maxtext_keys`: the rope_type and rope_interleave there determine the RoPE pairing.
    pairs = config.rope_type != "default" or is_latent(config)
    pairs &= config.rope_type != "yarn" or maxtext(config.decoder_block).interleaves
    heads = heads_to_reorder(config, {name: leaf.shape for name, leaf in leaves.items()}, pairs, "format=maxtext")
    step = folder / STEP
    with orbax.writer(step, {"scan_layers": scan, PAIRS: pairs}) as write, progress(leaves.values(), "writing") as tick:
        for name, leaf in leaves.items():
            write(_stored(config, name, leaf, targets[name], scan, heads.get(name, 0), tick))
    _as_maxtext_has_it(step)


def _stored(
    config: Config, name: str, leaf: Leaf, dtype: np.dtype, scan: bool, head: int, tick: Tick
) -> dict[str, np.ndarray]:
    """Returns MaxText's arrays for one canonical parameter, by path."""
    factor, offset = conversion(config, name)

    def theirs(value: np.ndarray) -> np.ndarray:
        value = reordered(value, head, pairs=not config.rope_interleave)
        if (factor, offset) != UNCHANGED:
            value = value.astype(np.float32) / np.float32(factor) + np.float32(offset)
        return value.astype(dtype, copy=False)

    if (where := place(stacks(config), name)) is None:
        return {ROOT + name: theirs(leaf.read(leaf.dtype, tick))}
    stacked_name, each = names_of(config, name, where)
    if not scan or left_over(where):
        names = each if not scan else [stacked_name]
        return {ROOT + there: theirs(layer) for there, layer in zip(names, leaf.layers(tick), strict=True)}
    stacked = np.empty((leaf.shape[1], leaf.shape[0], *leaf.shape[2:]), dtype)
    for i, layer in enumerate(leaf.layers(tick)):
        stacked[:, i] = theirs(layer)
    # MaxText 0.2.5 has router biases in another collection, with layers on axis 0.
    more = {BIASES + name: np.moveaxis(stacked, 1, 0)} if name.endswith(BIAS) else {}
    return {ROOT + stacked_name: stacked} | more


def _as_maxtext_has_it(step: Path) -> None:
    """Converts an Orbax v1 checkpoint to the names and files of Orbax v0, which MaxText uses."""
    (step / "state").rename(step / ITEMS)
    (step / "orbax.checkpoint").unlink()
    for folder in (step, step / ITEMS):
        (folder / _COMMITTED).touch()  # marks a complete checkpoint, in case it is copied to a bucket
    file = step / orbax.COMPOSITE
    metadata = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(metadata | {"item_handlers": {ITEMS: _HANDLER}}), encoding="utf-8")
