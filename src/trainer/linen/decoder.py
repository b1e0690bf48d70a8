"""A Linen decoder stack inside the NNX model."""

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.layers.context import Context
from trainer.layers.param import param
from trainer.linen.bridge import is_box, unboxed
from trainer.linen.layer import is_linen
from trainer.linen.stack import Stack, initializing
from trainer.models.transformer import Decoder
from trainer.sharding import off_mesh


class LinenStackDecoder(Decoder):
    """The NNX decoder whose blocks run under `linen.scan`; their parameters are held as nested `nnx.Param`s."""

    def make_layers(self, rngs: nnx.Rngs):
        """See `Decoder.make_layers`."""
        x = jnp.zeros((1, 1, self.config.base_emb_dim), self.config.dtype)
        ids = jnp.zeros((1, 1), jnp.int32)
        context = Context(ids, ids, rows=ids[0], key=None)
        init = _stack(initializing(self.config)).init
        # The bridge makes the model again within a step, where one row of one token fits no mesh.
        with off_mesh():
            variables = init(rngs.params(), x, None, context, (), method="run_layers")
        return nnx.data(jax.tree.map(lambda leaf: param(*unboxed(leaf)), variables["params"]["layers"], is_leaf=is_box))

    def run_layers(self, x, cache, context, types):
        """See `Decoder.run_layers`."""
        params = {"layers": nnx.to_pure_dict(nnx.state(self.layers))}
        apply = _stack(self.config).apply
        return apply({"params": params}, x, cache, context, types, method="run_layers")


def initial_decoder(config) -> type[Decoder]:
    """The decoder that draws initial parameters: the one of all combinations, unless NNX can not make the block."""
    return LinenStackDecoder if is_linen(config) else Decoder


def _stack(config) -> Stack:
    return Stack(config, parent=None)  # never a child of a Linen module that happens to be running
