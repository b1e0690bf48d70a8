"""Linen decoder stacks inside the NNX model."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from trainer.layers.context import Context
from trainer.layers.param import REST, Buffer, param
from trainer.linen.bridge import is_box, unboxed
from trainer.linen.layer import is_linen
from trainer.linen.stack import Stacks, initializing
from trainer.models.families import blocks, stacks
from trainer.models.transformer import Decoder
from trainer.sharding import off_mesh


class LinenStackDecoder(Decoder):
    """The NNX decoder whose blocks run under `linen.scan`; their variables are held as nested `nnx.Variable`s."""

    def make_layers(self, rngs: nnx.Rngs) -> dict[str, Any]:
        """See `Decoder.make_layers`."""
        x = jnp.zeros((1, 1, self.config.base_emb_dim), self.config.dtype)
        ids = jnp.zeros((1, 1), jnp.int32)
        context = Context(ids, ids, rows=ids[0], key=None)
        init = _stacks(initializing(self.config)).init
        # The bridge constructs the model again within a step, where no mesh divides one row of one token.
        with off_mesh():
            variables = init(rngs.params(), x, None, context, (), method="run_layers")
        params = jax.tree.map(lambda leaf: param(*unboxed(leaf)), variables.pop("params"), is_leaf=is_box)
        buffers = jax.tree.map(Buffer, linen.unbox(variables.get(REST, {})))
        held = nnx.to_pure_dict(nnx.merge_state(nnx.State(params), nnx.State(buffers)), lambda variable: variable)
        return {name: nnx.data(part) for name, part in held.items()}

    def run_layers(self, x, cache, context, types):
        """See `Decoder.run_layers`."""
        held = nnx.state({stack.name: getattr(self, stack.name) for stack in stacks(self.config)})
        params, buffers = (nnx.to_pure_dict(part) for part in nnx.filter_state(held, nnx.Param, Buffer))
        variables = {"params": params} | ({REST: buffers} if buffers else {})
        return _stacks(self.config).apply(variables, x, cache, context, types, method="run_layers")


def initial_decoder(config) -> type[Decoder]:
    """The decoder that draws initial parameters: the one of all combinations, unless the blocks are Linen modules."""
    return LinenStackDecoder if any(map(is_linen, blocks(stacks(config)))) else Decoder


def _stacks(config) -> Stacks:
    return Stacks(config, parent=None)  # never a child of a Linen module that happens to be running
