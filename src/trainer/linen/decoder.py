"""Linen decoder stacks inside the NNX model."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.config.keys import Config
from trainer.layers.loop import run_layer
from trainer.layers.param import REST, Buffer, buffer, param
from trainer.layers.stack import MakeBlock, Stack
from trainer.linen.bridge import is_box, unboxed
from trainer.linen.layer import apply_layer, is_linen, make_layer
from trainer.linen.stack import Stacks, init_stacks, initializing
from trainer.models.families import blocks, stacks
from trainer.models.mtp import last_block
from trainer.models.remat import remat_policy
from trainer.models.transformer import Decoder
from trainer.ops.paths import path_of
from trainer.products.context import Context
from trainer.sharding import off_mesh


class LinenStackDecoder(Decoder):
    """An NNX decoder with blocks that run under `linen.scan`. It stores their variables in dicts of `nnx.Variable`s."""

    def make_layers(self, rngs: nnx.Rngs) -> dict[str, Any]:
        variables = init_stacks(self.config, rngs.params())
        return {name: nnx.data(part) for name, part in _held(variables, stacks(self.config)).items()}

    @classmethod
    def make_block(cls, config: Config, block: MakeBlock, path: str, rngs: nnx.Rngs) -> Any:
        """See `Decoder.make_block`. For a Linen block, returns its variables."""
        if not is_linen(block):
            return super().make_block(config, block, path, rngs)
        x = jnp.zeros((1, 1, config.base_emb_dim), config.dtype)
        ids = jnp.zeros((1, 1), jnp.int32)
        context = Context(ids, ids, rows=ids[0], key=None)
        with off_mesh():
            layer = make_layer(initializing(config), block, path, parent=None)
            return nnx.data(_held(dict(layer.init(rngs.params(), x, None, context))))

    def run_block(self, held, x, context, types):
        if isinstance(held, nnx.Module):
            return super().run_block(held, x, context, types)
        layer = make_layer(self.config, last_block(self.config)[1], "", parent=None)  # a Linen block ignores the path
        call = functools.partial(apply_layer, layer, types)
        return run_layer(call, _variables(held), x, context, types, remat_policy(self.config))

    def run_layers(self, x, cache, context, types):
        variables = _variables({stack.name: getattr(self, stack.name) for stack in stacks(self.config)})
        stacked = Stacks(self.config, parent=None)  # not a child of the running Linen module, if any
        return stacked.apply(variables, x, cache, context, types, method="run_layers")


def initial_decoder(config: Config) -> type[Decoder]:
    """Returns the class of the decoder that draws the initial parameters.

    This is `LinenStackDecoder` if any block is a Linen module, and otherwise `Decoder`.
    """
    return LinenStackDecoder if any(map(is_linen, blocks(stacks(config)))) else Decoder


def _held(variables: Mapping[str, Any], stacks: Sequence[Stack] = ()) -> dict[str, Any]:
    """Returns Linen variables as a nested dict of `nnx.Variable`s. `stacks`: the stacks in `variables`."""
    axes = {stack.name: stack.axes for stack in stacks}

    def held(path: Any, leaf: Any) -> Any:
        return param(*unboxed(leaf, axes.get(path_of(path)[0], ())))

    params = jax.tree_util.tree_map_with_path(held, variables["params"], is_leaf=is_box)
    buffers = jax.tree.map(_buffer, variables.get(REST, {}), is_leaf=is_box)
    return nnx.to_pure_dict(nnx.merge_state(nnx.State(params), nnx.State(buffers)), lambda variable: variable)


def _buffer(leaf: Any) -> Buffer:
    return buffer(leaf.value, leaf.names) if is_box(leaf) else Buffer(leaf)


def _variables(held: dict[str, Any]) -> dict[str, Any]:
    """Inverts `_held`, but returns values without boxes."""
    params, buffers = (nnx.to_pure_dict(part) for part in nnx.filter_state(nnx.state(held), nnx.Param, Buffer))
    return {"params": params} | ({REST: buffers} if buffers else {})
