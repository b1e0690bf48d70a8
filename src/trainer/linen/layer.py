"""A block as a Linen module: an NNX block is bridged, a Linen block is used directly."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx, traverse_util
from flax.nnx import bridge

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.layers.loop import cast_in_loop
from trainer.layers.param import REST
from trainer.layers.sown import Sown, capture, type_names
from trainer.layers.stack import MakeBlock
from trainer.linen.bridge import capturing, to_linen
from trainer.models.families import block_class, blocks, check_calls, check_state, refuse_state, stacks, with_products
from trainer.models.transformer import Types
from trainer.ops.random import seed_key
from trainer.products.context import Context

# The Linen collections that a block may have; all are stacked over layers.
COLLECTIONS = ("params", REST)


def is_linen(block: MakeBlock) -> bool:
    """Returns whether a block is not an NNX module and is thus used as a Linen module."""
    return not issubclass(block_class(block), nnx.Module)


def make_layer(config: Config, block: MakeBlock, path: str, **fields: Any) -> linen.Module:
    """Returns one block, with the canonical name `path`, as a Linen module.

    `fields` are the fields that every Linen module has: name and parent.
    """
    if not is_linen(block):
        return to_linen(_construct, block, config, path, **fields)
    if not issubclass(block_class(block), linen.Module):
        raise UserError(f"decoder_block={config.decoder_block}: this is neither an nnx.Module nor a linen.Module")
    check_calls(block, ("config",), config.decoder_block)
    return block(config, **fields)


def _construct(block: MakeBlock, config: Config, path: str, rngs: nnx.Rngs) -> nnx.Module:
    # The bridge passes rngs by keyword, but a block takes it by position.
    return with_products(config, path, block(config, rngs), rngs)


def check_layer(config: Config) -> None:
    """Checks NNX and Linen blocks as `models.families.check_state` checks NNX blocks."""
    check_state(config, subclasses=False)
    for block in filter(is_linen, blocks(stacks(config))):
        _check_linen(config, block)


def _check_linen(config: Config, block: MakeBlock) -> None:
    x, ids = jnp.zeros((1, 1, config.base_emb_dim), config.dtype), jnp.zeros((1, 1), jnp.int32)
    # Give both random keys, because `init` fails if a block uses a missing key. A block may use keys, not store them.
    keys = {"params": seed_key(0), "dropout": seed_key(0)}
    args = x, None, Context(ids, ids, rows=ids[0], key=None)
    variables = dict(jax.eval_shape(lambda: make_layer(config, block, "", parent=None).init(keys, *args)))
    params = variables.pop("params", {})
    known = {REST, "intermediates", *type_names()}
    refuse_state(config, bool(params), sorted(set(variables) - known))


def call_layer(
    block: linen.Module, cast_inside: bool, types: Types, number: jax.Array, x: jax.Array, *args: Any
) -> tuple[Any, Sown]:
    """Runs `block` on `x` and `args`, as one layer of a rolled loop.

    Returns the result and the block's sown values of `types`. `block` is a child of the running module. `number` is the
    layer's number. See `layers.loop.run_loop` for `cast_inside`.
    """
    if isinstance(block, bridge.ToLinen):

        def in_loop(module, number, x, *args):
            module = cast_in_loop(module, number, x.dtype) if cast_inside else module
            return capture(module, types)(x, *args)

        return block(number, x, *args, nnx_method=in_loop)
    if block.is_initializing():
        return block(x, *args), {}
    variables = dict(block.variables)
    if cast_inside:
        variables = cast_in_loop(variables, number, x.dtype)
    return apply_layer(block.clone(parent=None), types, variables, x, *args)


def apply_layer(block: linen.Module, types: Types, variables: Any, *args: Any) -> tuple[Any, Sown]:
    """Applies the unbound `block` to `variables` and `args`.

    Returns the result and the block's sown values of `types`. A Linen block sows into collections that are named after
    the types. It draws dropout from the random key of the layer's context, which is the last of `args`.
    """
    if isinstance(block, bridge.ToLinen):
        return block.apply(variables, *args, nnx_method=capturing(types))
    names = [variable_type.__name__ for variable_type in types]
    rngs = None if args[-1].key is None else {"dropout": args[-1].key}
    result, sown = block.apply(variables, *args, rngs=rngs, mutable=names)
    return result, {name: _last(traverse_util.flatten_dict(sown.get(name, {}), sep="/")) for name in names}


def _last(sown: dict[str, Any]) -> dict[str, Any]:
    """Returns the last value of each name, as `layers.sown` does; Linen's default `sow` makes a tuple of all values."""
    return {path: value[-1] if isinstance(value, tuple) else value for path, value in sown.items()}
