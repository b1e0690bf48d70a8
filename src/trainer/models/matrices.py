"""The matrices of a model, and which of them are quantized."""

from typing import Any

import jax
from flax import nnx

from trainer.config import Config, UserError
from trainer.layers.matrices import matrices
from trainer.models.families import block_class, product_rules, stacks
from trainer.models.mtp import BLOCK, PROJECTION, depths, last_block, part_path
from trainer.models.quantization import check_unquantized, is_quantized
from trainer.models.transformer import head_matrix
from trainer.products import maker


def matrix_names(config: Config) -> list[str]:
    """Returns the canonical names of the matrices whose products are chosen by rules, in the order of the forward pass.

    Raises:
      UserError: a block is a user's Linen module, whose products are its own.
    """
    found: list[str] = []

    def add(path: str, block: Any) -> None:
        if not issubclass(block_class(block), nnx.Module):
            raise UserError(
                f"quantization={config.quantization}: {block_class(block).__name__} is a Linen module, which has its "
                "own products; only those of NNX layers are quantized"
            )
        jax.eval_shape(lambda: found.extend(kernel.name for *_, kernel in matrices(block(config, nnx.Rngs(0)), path)))

    for stack in stacks(config):
        for block, path in zip(stack.blocks, stack.paths, strict=True):
            add(f"decoder/{path}", block)
    for k in depths(config):
        found.append(f"{part_path(k, PROJECTION)}/kernel")
        add(part_path(k, BLOCK), last_block(config)[1])
    return [*found, "/".join(head_matrix(config))]


def quantized_names(config: Config) -> list[str]:
    """Returns the matrices that are quantized; [] without `quantization`.

    Raises:
      UserError: see `matrix_names`; or unquantized_modules names a matrix that the model lacks.
    """
    if not config.quantization:
        return []
    names, rules = matrix_names(config), product_rules(config)
    check_unquantized(config, names)
    return [name for name in names if is_quantized(maker(rules, name))]
