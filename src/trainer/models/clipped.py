"""The layers whose heads QK-Clip clips."""

from typing import Any

from flax import nnx

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.layers.clip import Clipped
from trainer.layers.stack import MakeBlock
from trainer.models.families import block_class, stacks
from trainer.models.mtp import BLOCK, depths, last_block, part_path
from trainer.models.transformer import Transformer

STATEMENT = "logit_factors"


def clipped_layers(config: Config) -> dict[str, Clipped]:
    """Returns the layers of the model that define `logit_factors`: a dict from the canonical path of a layer's
    parameters to the layer.

    If all blocks are NNX modules, the whole model is searched; otherwise, only the blocks of the stacks and of
    multi-token prediction are searched. The arrays of the returned layers are abstract. Call this function in
    `backends.base.tree_mode`.

    Raises:
      UserError: a block has no such layer and does not set `logit_factors = None`, or the model has no such layer.
    """
    declared = {
        f"decoder/{path}": block
        for stack in stacks(config)
        for path, block in zip(stack.paths, stack.blocks, strict=True)
    }
    declared |= {part_path(k, BLOCK): last_block(config)[1] for k in depths(config)}
    found: dict[str, Clipped] = {}
    if all(issubclass(block_class(block), nnx.Module) for block in declared.values()):
        found = _stating(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0))), "")
    else:
        for path, block in declared.items():
            found |= _in_block(config, block, path)
    silent = {
        block_class(block).__name__
        for path, block in declared.items()
        if getattr(block_class(block), STATEMENT, "") is not None and not any(_within(layer, path) for layer in found)
    }
    if silent:
        raise UserError(
            f"use_qk_clip=true: {', '.join(sorted(silent))} of decoder_block={config.decoder_block} has no layer that "
            f"defines {STATEMENT}, so its heads cannot be clipped; define it (trainer.layers.clip), or set "
            f"{STATEMENT} = None in the class of a block without attention"
        )
    if not found:
        raise UserError(
            f"use_qk_clip=true: no block of decoder_block={config.decoder_block} has attention; set use_qk_clip=false"
        )
    return found


def _in_block(config: Config, block: MakeBlock, path: str) -> dict[str, Clipped]:
    if issubclass(block_class(block), nnx.Module):
        return _stating(nnx.eval_shape(lambda: block(config, nnx.Rngs(params=0))), path)
    made = block(config)  # has no parameters, because Linen stores them outside of the module
    return {path: made} if _states(made) else {}


def _stating(module: nnx.Module, path: str) -> dict[str, Clipped]:
    """Returns the layers of `module`, at `path`, that define `logit_factors`; of nested layers, only the outermost."""
    found: dict[str, Clipped] = {}
    for below, layer in sorted(nnx.iter_modules(module), key=lambda item: len(item[0])):
        name = "/".join(filter(None, (path, *map(str, below))))
        if _states(layer) and not any(_within(name, outer) for outer in found):
            found[name] = layer  # type: ignore[assignment]
    return found


def _states(layer: Any) -> bool:
    return callable(getattr(layer, STATEMENT, None))


def _within(path: str, outer: str) -> bool:
    return f"{path}/".startswith(f"{outer}/")
