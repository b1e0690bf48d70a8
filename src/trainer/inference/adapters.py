"""Serves several adapters with one base model: concatenates them into a single adapter.

The product with an adapter of rank r is a sum of r terms, called ranks here. Each row of a batch can use a different
adapter: the field `ranks` of `trainer.products.context.Context` selects the ranks of that adapter.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from trainer.checkpoint.base import check_base
from trainer.config.capabilities.lora_keys import ADAPTER, LAYERS, B
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.models.adapters import kernel_of
from trainer.models.matrices import lora_kernels, matrix_names
from trainer.models.transformer import head_matrix
from trainer.weights.adapters import Adapters
from trainer.weights.open import weight_shapes


def with_adapters(
    config: Config, adapters: Sequence[Adapters], *, apart: bool = False
) -> tuple[Any, np.ndarray | None]:
    """Returns the configuration of a model with the ranks of all `adapters`, and a mask for `Served.ranks` in
    `trainer.inference.served`: bool [adapters + 1, ranks], true for the ranks of each adapter, where index 0 stands for
    no adapter. The mask is None if rows do not select adapters.

    Args:
      config: the base's resolved configuration.
      apart: whether each row selects an adapter or none, even if there is only one adapter. With several adapters, rows
        always do.

    Raises:
      UserError: rows cannot use different adapters in the same products, or batch_invariant does not allow them.
    """
    keys = [found.lora_keys(config) for found in adapters]
    if config.batch_invariant:
        _check_bits(config, adapters, keys, apart)
    if len(adapters) == 1 and not apart:
        return Config({**config, **keys[0], "lora_restore_path": str(adapters[0].path)}), None
    patterns = dict.fromkeys(each["lora_module_path"] for each in keys)
    pattern = next(iter(patterns)) if len(patterns) == 1 else "|".join(f"(?:{one or LAYERS})" for one in patterns)
    if len({(each.get("lora_weight_qtype", ""), each.get("lora_tile_size", 0)) for each in keys}) > 1:
        raise UserError("adapters: lora_weight_qtype or lora_tile_size of their bases differ; serve them one by one")
    ranks = [each["lora_rank"] for each in keys]
    # lora_alpha / lora_rank is 1 for all adapters together, because `loaded` multiplies each adapter's matrix b by that
    # adapter's lora_alpha / lora_rank.
    whole = {**keys[0]} | {
        "enable_lora": True,
        "lora_rank": sum(ranks),
        "lora_alpha": float(sum(ranks)),
        "lora_module_path": pattern,
    }
    config = Config({**config, **whole})
    names = matrix_names(config, "enable_lora")
    kernels = lora_kernels(config, dict.fromkeys(names, (0, 0)))
    if groups := [name for name, kernel in kernels.items() if kernel.groups]:
        raise UserError(f"adapters: {groups[0]} belongs to experts, which reorder rows; serve them one by one")
    if (head := "/".join(head_matrix(config))) in kernels:
        raise UserError(f"adapters: the output head {head} must be the same matrix for all rows; serve them one by one")
    owner = np.repeat(np.arange(1, len(ranks) + 1), ranks)
    return config, np.arange(len(ranks) + 1)[:, None] == owner


def _check_bits(config: Config, adapters: Sequence[Adapters], keys: Sequence[Mapping[str, Any]], apart: bool) -> None:
    """Raises UserError if products with the adapters would not be bitwise equal to the same products in training."""
    if len(adapters) > 1 and config.dtype != "bfloat16":
        raise UserError(
            f"batch_invariant=true: with dtype={config.dtype}, bits depend on the ranks of all adapters "
            "together; serve them one "
            "by one, or train and generate with dtype=bfloat16"
        )
    for found, each in zip(adapters, keys, strict=True):
        if each.get("lora_weight_qtype"):
            raise UserError(
                f"batch_invariant=true: {found.path} has lora_weight_qtype={each['lora_weight_qtype']}: "
                "bitwise equality is not verified for it"
            )
        scale = each["lora_alpha"] / each["lora_rank"]
        # Training multiplies the product of x and a by the scale, but `loaded` multiplies the matrix b by the scale.
        # The results are bitwise equal only if the scale is a power of two.
        if (apart or len(adapters) > 1) and math.frexp(scale)[0] != 0.5:
            raise UserError(
                f"batch_invariant=true: {found.path} has lora_alpha / lora_rank = {scale:g}, which is not a "
                "power of two, so its bits differ from training if rows select adapters; generate with it alone"
            )


def loaded(config: Config, adapters: Sequence[Adapters], weights: dict[str, Any]) -> dict[str, Any]:
    """Returns `weights` with the adapters' matrices replaced by the values of all `adapters`.

    Args:
      config: from `with_adapters`.
      weights: a dict from canonical names to the weights of a model of `config` on its devices.

    Raises:
      UserError: a run with adapters also trained other parameters, or the adapters are for another base.
    """
    values = {name: np.zeros(leaf.shape, np.float32) for name, leaf in weights.items() if ADAPTER.search(name)}
    kernels = lora_kernels(config, dict.fromkeys(matrix_names(config, "enable_lora"), (0, 0)))
    parameters = {tuple(name.split("/")): leaf for name, leaf in weights.items() if name not in values}
    first = 0
    for found in adapters:
        keys = found.lora_keys(config)
        own = Config({**config, **keys})
        leaves = found.leaves(own, weight_shapes(own))
        if others := leaves.keys() - values.keys():
            raise UserError(f"{found.path}: {min(others)} was also trained, so it cannot share a base; serve it alone")
        check_base(parameters, found.origin, found.path)
        for name, leaf in leaves.items():
            value, target = leaf.read(np.dtype(np.float32), lambda size: None), values[name]
            axis = -1
            if name.endswith(B):
                value, axis = (
                    value * (keys["lora_alpha"] / keys["lora_rank"]),
                    -1 - len(kernels[kernel_of(name)].out_shape),
                )
            np.moveaxis(target, axis, 0)[first : first + keys["lora_rank"]] = np.moveaxis(value, axis, 0)
        first += keys["lora_rank"]
    arrays = {name: value.astype(weights[name].dtype) for name, value in values.items()}
    return weights | {name: jax.device_put(array, weights[name].sharding) for name, array in arrays.items()}
