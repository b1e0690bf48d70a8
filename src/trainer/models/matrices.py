"""The matrices of a model, and which of them are quantized or masked."""

import math

import jax
from flax import nnx

from trainer.config import Config, UserError
from trainer.config.sparsity_keys import M, is_sparse
from trainer.layers.matrices import matrices
from trainer.layers.stack import MakeBlock
from trainer.models.families import block_class, stacks, unmasked_rules
from trainer.models.mtp import BLOCK, PROJECTION, depths, last_block, part_path
from trainer.models.quantization import check_unquantized, is_quantized
from trainer.models.sparsity import is_masked
from trainer.models.transformer import head_matrix
from trainer.products import Kernel, maker


def matrix_names(config: Config) -> list[str]:
    """Returns the canonical names of the matrices whose products are chosen by rules, in the order of the forward pass.

    Raises:
      UserError: a block is a user's Linen module, whose products are its own.
    """
    found: list[str] = []

    def add(path: str, block: MakeBlock) -> None:
        found.extend(kernel.name for kernel in _kernels(config, path, block, "quantization"))

    for stack in stacks(config):
        for block, path in zip(stack.blocks, stack.paths, strict=True):
            add(f"decoder/{path}", block)
    for k in depths(config):
        found.append(f"{part_path(k, PROJECTION)}/kernel")
        add(part_path(k, BLOCK), last_block(config)[1])
    return [*found, "/".join(head_matrix(config))]


def _kernels(config: Config, path: str, block: MakeBlock, key: str) -> list[Kernel]:
    """Returns the matrices of a block, whose canonical name is `path`, for the sake of `key`."""
    if not issubclass(block_class(block), nnx.Module):
        raise UserError(
            f"{key}={config[key]}: {block_class(block).__name__} is a Linen module, which has its own products; only "
            "those of NNX layers can be chosen"
        )
    found: list[Kernel] = []
    jax.eval_shape(lambda: found.extend(kernel for *_, kernel in matrices(block(config, nnx.Rngs(0)), path)))
    return found


def masked_kernels(config: Config) -> list[Kernel]:
    """Returns the matrices that weight sparsity masks; [] without it.

    Raises:
      UserError: a block is a user's Linen module, or the length of the axis that a product sums over is no multiple of
        weight_sparsity_m.
    """
    if not is_sparse(config):
        return []
    found = [
        kernel
        for stack in stacks(config)
        for block, path in zip(stack.blocks, stack.paths, strict=True)
        for kernel in _kernels(config, f"decoder/{path}", block, M)
        if is_masked(kernel.name)
    ]
    lengths = {kernel.name: math.prod(kernel.in_shape) for kernel in found}
    if unfit := [f"{name}: {length}" for name, length in lengths.items() if length % config[M]]:
        raise UserError("\n  ".join([f"{M}={config[M]} does not divide the number of inputs of", *unfit]))
    return found


def quantized_names(config: Config) -> list[str]:
    """Returns the matrices that are quantized; [] without `quantization`.

    Raises:
      UserError: see `matrix_names`; or unquantized_modules names a matrix that the model lacks.
    """
    if not config.quantization:
        return []
    names, rules = matrix_names(config), unmasked_rules(config)
    check_unquantized(config, names)
    return [name for name in names if is_quantized(maker(rules, name))]
