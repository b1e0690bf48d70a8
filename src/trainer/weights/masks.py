"""The masks of sparse weights: checks that a checkpoint has them, and applies them for formats without masks."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.layers.sparse import mask_name
from trainer.leaves.source import Leaf, Shapes, Source
from trainer.models.matrices import masked_kernels


def masks_of(config: Config) -> dict[str, str]:
    """Maps the canonical names of the masks in a model of `config` to the names of the kernels that they mask."""
    return {mask_name(kernel): kernel.name for kernel in masked_kernels(config)}


def check_masks(config: Config, source: Source, shapes: Shapes) -> None:
    """Checks that `source` has masks if a model of `config` needs them. `shapes`: the shapes of the model's weights.

    Raises:
      UserError: `source` has no masks; the message lists the keys that require masks.
    """
    masks = {name: shapes[name] for name in masks_of(config)}
    if masks and not source.held(config, masks):
        raise UserError(f"{source.path}: it has no weight masks; leave out weight_sparsity_n and weight_sparsity_m")


def with_zeros(config: Config, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Returns the weights `leaves` of a model of `config` with masked weights set to 0, and without the masks. The
    result can be written, but not placed on devices."""
    found = dict(leaves)
    for mask, kernel in masks_of(config).items():
        (of_mask,), leaf = found.pop(mask).parts, leaves[kernel]
        (of_kernel,) = leaf.parts  # only the trainer's own checkpoints have masks, and their leaves have one part
        found[kernel] = dataclasses.replace(leaf, parts=[_masked(of_kernel, of_mask)], puts=())
    return found


def _masked(kernel: Callable[[], np.ndarray], mask: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        value = kernel()
        return np.where(mask(), value, np.zeros((), value.dtype))

    return read
