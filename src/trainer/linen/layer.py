"""The configured block as a Linen module: an NNX block bridged, a Linen block as it is."""

from typing import Any

from flax import linen, nnx, traverse_util
from flax.nnx import bridge

from trainer.config import UserError
from trainer.layers.sown import Sown
from trainer.linen.bridge import capturing, to_linen
from trainer.models.blocks import block_class, make_block
from trainer.models.transformer import Types


def is_linen(config: Any) -> bool:
    """Whether the configured block is somebody's own Linen module."""
    return not issubclass(block_class(config), nnx.Module)


def make_layer(config: Any, **fields: Any) -> linen.Module:
    """One block. `fields` are those of every Linen module: name, parent."""
    if not is_linen(config):
        return to_linen(make_block, config, **fields)
    found = block_class(config)
    if not issubclass(found, linen.Module):
        raise UserError(f"decoder_block={config.decoder_block}: this is neither an nnx.Module nor a linen.Module")
    return found(config, **fields)


def call_layer(block: linen.Module, types: Types, *args: Any) -> tuple[Any, Sown]:
    """What `block`, a child of the module that runs, gives for `args`, and what it sowed of `types`."""
    if isinstance(block, bridge.ToLinen):
        return block(*args, nnx_method=capturing(types))
    if block.is_initializing():
        return block(*args), {}
    return apply_layer(block.clone(parent=None), block.variables["params"], types, *args)


def apply_layer(block: linen.Module, params: Any, types: Types, *args: Any) -> tuple[Any, Sown]:
    """The same of a block without a parent, with `params`.

    A Linen block sows into collections of the types' names, and draws dropout from the layer's key (the last of
    `args`), which is also its argument.
    """
    if isinstance(block, bridge.ToLinen):
        return block.apply({"params": params}, *args, nnx_method=capturing(types))
    names = [variable_type.__name__ for variable_type in types]
    rngs = None if args[-1] is None else {"dropout": args[-1]}
    result, sown = block.apply({"params": params}, *args, rngs=rngs, mutable=names)
    return result, {name: _last(traverse_util.flatten_dict(sown.get(name, {}), sep="/")) for name in names}


def _last(sown: dict[str, Any]) -> dict[str, Any]:
    """Linen's own `sow` makes a tuple of all values of a name; ours keeps the last."""
    return {path: value[-1] if isinstance(value, tuple) else value for path, value in sown.items()}
