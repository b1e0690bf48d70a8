"""A Linen decoder stack inside the NNX model."""

import jax
import jax.numpy as jnp
from flax import linen, nnx

from trainer.layers.param import param
from trainer.linen.stack import Stack, initializing
from trainer.models.transformer import Decoder
from trainer.sharding import off_mesh


class LinenStackDecoder(Decoder):
    """The NNX decoder whose blocks run under `linen.scan`; their parameters are held as nested `nnx.Param`s."""

    def make_layers(self, rngs: nnx.Rngs):
        """See `Decoder.make_layers`."""
        x = jnp.zeros((1, 1, self.config.base_emb_dim), self.config.dtype)
        id_bt, row_b = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
        init = _stack(initializing(self.config)).init
        with off_mesh():
            variables = init(rngs.params(), x, None, id_bt, id_bt, row_b, key=None, types=(), method="run_layers")
        return nnx.data(
            jax.tree.map(
                lambda box: param(box.value, box.names),
                variables["params"]["layers"],
                is_leaf=lambda x: isinstance(x, linen.LogicallyPartitioned),
            )
        )

    def run_layers(self, x, cache, *context, key, types):
        """See `Decoder.run_layers`."""
        params = {"layers": nnx.to_pure_dict(nnx.state(self.layers))}
        apply = _stack(self.config).apply
        return apply({"params": params}, x, cache, *context, key=key, types=types, method="run_layers")


def _stack(config) -> Stack:
    return Stack(config, parent=None)  # never a child of a Linen module that happens to be running
