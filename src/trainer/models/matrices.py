"""The matrices of a model, and which of them are adapted, quantized or masked."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.layers.matrices import matrices
from trainer.layers.stack import MakeBlock
from trainer.models.adapters import is_adapted
from trainer.models.families import block_class, stacks, unmasked_rules
from trainer.models.mtp import BLOCK, PROJECTION, depths, last_block, part_path
from trainer.models.quantization import check_unquantized, is_quantized
from trainer.models.sparsity import is_masked
from trainer.models.transformer import head_matrix
from trainer.ops.paths import by_name, listed
from trainer.products.plain import Kernel, maker
from trainer.sharding import leading

_CHOSEN = "a matrix must be in an NNX layer of trainer.layers, and the family or another key must not set its product"


def matrix_names(config: Config, key: str = "quantization") -> list[str]:
    """Returns the canonical names of the matrices to which product rules apply, in the order of the forward pass.

    `key`: the configuration key to name in error messages.

    Raises:
      UserError: a block is a Linen module, to which product rules do not apply.
    """
    found: list[str] = []

    def add(path: str, block: MakeBlock) -> None:
        found.extend(kernel.name for kernel in _kernels(config, path, block, key))

    for stack in stacks(config):
        for block, path in zip(stack.blocks, stack.paths, strict=True):
            add(f"decoder/{path}", block)
    for k in depths(config):
        found.append(f"{part_path(k, PROJECTION)}/kernel")
        add(part_path(k, BLOCK), last_block(config)[1])
    return [*found, "/".join(head_matrix(config))]


def _kernels(config: Config, path: str, block: MakeBlock, key: str) -> list[Kernel]:
    """Returns the matrices of the block with the canonical name `path`. `key`: see `matrix_names`."""
    if not issubclass(block_class(block), nnx.Module):
        raise UserError(
            f"{key}={config[key]}: {block_class(block).__name__} is a Linen module, whose products cannot be changed; "
            "only those of NNX layers can"
        )
    found: list[Kernel] = []
    with nnx.use_eager_sharding(False):
        jax.eval_shape(lambda: found.extend(kernel for *_, kernel in matrices(block(config, nnx.Rngs(0)), path)))
    return found


def quantized_kernels(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Kernel]:
    """Returns the matrices that are quantized, by canonical name.

    Args:
      shapes: the shapes of the weights in the unquantized model.

    Raises:
      UserError: see `check_matrices`.
    """
    check_matrices(config)
    found = _matrices(config, "quantization")
    # The matrices outside of blocks (the output head, and projections of multi-token prediction) have one input axis.
    return {
        name: found[name] if name in found else Kernel(shapes[name][:1], shapes[name][1:], (None, None), name=name)
        for name in quantized_names(config)
    }


def _matrices(config: Config, key: str) -> dict[str, Kernel]:
    """Returns the matrices of all blocks by canonical name. `key`: see `matrix_names`."""
    blocks = [
        (f"decoder/{path}", block)
        for stack in stacks(config)
        for block, path in zip(stack.blocks, stack.paths, strict=True)
    ]
    blocks += [(part_path(k, BLOCK), last_block(config)[1]) for k in depths(config)]
    return {kernel.name: kernel for path, block in blocks for kernel in _kernels(config, path, block, key)}


def lora_kernels(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Kernel]:
    """Returns the matrices with an adapter, by canonical name; {} without LoRA. `shapes`: see `quantized_kernels`."""
    if not config.enable_lora:
        return {}
    found = _matrices(config, "enable_lora")
    return {
        name: found[name] if name in found else Kernel(shapes[name][:1], shapes[name][1:], (None, None), name=name)
        for name in adapted_names(config)
    }


def adapted_names(config: Config) -> list[str]:
    """Returns the canonical names of the matrices with an adapter; [] without LoRA.

    Raises:
      UserError: lora_module_path matches no matrix, or `matrix_names` raises the error.
    """
    if not config.enable_lora:
        return []
    names = matrix_names(config, "enable_lora")
    if found := [name for name in names if is_adapted(config, name)]:
        return found
    raise UserError(f"lora_module_path={config.lora_module_path}: matches no matrix; the matrices are: {listed(names)}")


def masked_kernels(config: Config) -> list[Kernel]:
    """Returns the matrices that weight sparsity masks; [] without weight sparsity.

    Raises:
      UserError: a block is a Linen module, no matrix is masked, or a matrix's number of inputs is not a multiple of
        weight_sparsity_m.
    """
    if (m := config.weight_sparsity_m) is None:
        return []
    found = [
        kernel
        for stack in stacks(config)
        for block, path in zip(stack.blocks, stack.paths, strict=True)
        for kernel in _kernels(config, f"decoder/{path}", block, "weight_sparsity_m")
        if is_masked(kernel.name)
    ]
    if not found:
        raise UserError(f"weight_sparsity_m={m}: no matrix is masked; {_CHOSEN}")
    lengths = {kernel.name: math.prod(kernel.in_shape) for kernel in found}
    if unfit := [f"{name}: {length}" for name, length in lengths.items() if length % m]:
        raise UserError("\n  ".join([f"weight_sparsity_m={m} does not divide the number of inputs of", *unfit]))
    return found


def quantized_names(config: Config) -> list[str]:
    """Returns the canonical names of the matrices that are quantized; [] without `quantization`.

    Raises:
      UserError: see `matrix_names`.
    """
    if not config.quantization:
        return []
    rules = unmasked_rules(config)
    return [name for name in matrix_names(config) if is_quantized(maker(rules, name))]


def check_matrices(config: Config) -> None:
    """Checks that the keys for LoRA, quantization and sparsity each select a matrix.

    Raises:
      UserError: one of these keys selects no matrix, a pattern of unquantized_modules matches no matrix, or
        `matrix_names` or `masked_kernels` raises the error.
    """
    masked_kernels(config)
    adapted_names(config)
    if config.quantization:
        check_unquantized(config, matrix_names(config))
        if not quantized_names(config):
            raise UserError(f"quantization={config.quantization}: no matrix is quantized; {_CHOSEN}")


def quantized_and_float(config: Config, param_axes: Any) -> tuple[list[str], list[str]]:
    """Returns two lists of canonical names: the matrices whose products are quantized, and the other parameters with
    at least two axes (such as lookup tables), except biases. Without `quantization`, both lists are empty.

    Args:
      param_axes: the logical axes of the model's parameters.
    """
    if not config.quantization:
        return [], []
    quantized, names = quantized_names(config), matrix_names(config)
    axes = {name: [*found[leading(found) :]] for name, found in by_name(param_axes).items()}
    tables = [name for name, found in axes.items() if len(found) > 1 and not name.endswith(("/bias", "_bias"))]
    stored = tuple(f"{name}/" for name in names)  # the name prefixes of arrays that together store a matrix
    return quantized, [name for name in tables if name not in quantized and not name.startswith(stored)]
