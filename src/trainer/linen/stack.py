"""The decoder stack in Linen: `linen.scan` and `linen.remat` over the configured block."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from flax import linen
from jax.ad_checkpoint import checkpoint_name

from trainer.layers.remat import LAYER_INPUT
from trainer.layers.sown import Sown, capture
from trainer.layers.stack import cast_in_loop
from trainer.linen.bridge import to_linen
from trainer.models.remat import remat_policy
from trainer.models.transformer import Types, casts_in_loop, make_block


def initializing(config: Any) -> ml_collections.FrozenConfigDict:
    """`config` for an initialization, which Linen traces with one token.

    Parameters do not depend on the attention op, but kernels refuse such a length, or a row that no mesh splits.
    """
    return ml_collections.FrozenConfigDict({**config, "attention": "dot_product"})


class Stack(linen.Module):
    """The blocks; their parameters are stacked on axis 0 under the name "layers", rolled loop or not."""

    config: Any

    @linen.compact
    def run_layers(self, x, cache, *context, key, types: Types) -> tuple[jax.Array, Any, Sown]:
        """What `layers.stack.run_stack` does: the last block's x, the cache, and what the blocks sowed."""

        def call(block, index, x, *args):
            if casts_in_loop(self.config):
                block = cast_in_loop(block, index, x.dtype)
            return capture(block, types)(x, *args)

        def body(block, x, layer):
            index, cache = layer
            layer_key = None if key is None else jax.random.fold_in(key, index)
            x = checkpoint_name(x, LAYER_INPUT)
            (x, cache), sown = block(index, x, cache, *context, layer_key, nnx_method=call)
            return x, (cache, sown)

        layers = jnp.arange(self.config.base_num_decoder_layers), cache
        if self.config.scan_layers:
            x, (cache, sown) = self._scan(body, x, layers)
        else:
            x, (cache, sown) = self._unroll(body, x, layers)
        return x, cache, sown

    def _scan(self, body, x, layers):
        if (policy := remat_policy(self.config)) is not None:
            body = linen.remat(body, prevent_cse=False, policy=policy)
        scan = linen.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.config.base_num_decoder_layers,
            metadata_params={linen.PARTITION_NAME: "layers"},
        )
        return scan(to_linen(make_block, self.config, name="layers"), x, layers)

    def _unroll(self, body, x, layers):
        # One parameter that holds the stacked tree, and a loop over slices cut outside of the checkpointed body: the
        # tree and axes of linen.scan, and the NNX stack's loop.
        block = to_linen(make_block, self.config, parent=None)
        params = self.param("layers", lambda key: self._init_stacked(block, body, key, x, layers))

        def step(params, x, layer):
            return body(lambda *args, **kw: block.apply({"params": params}, *args, **kw), x, layer)

        if (policy := remat_policy(self.config)) is not None:
            step = jax.checkpoint(step, prevent_cse=True, policy=policy)
        outputs = []
        for i in range(self.config.base_num_decoder_layers):
            params_i, layer = jax.tree.map(lambda a, i=i: a[i], (linen.unbox(params), layers))
            x, output = step(params_i, x, layer)
            outputs.append(output)
        return x, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)

    def _init_stacked(self, block, body, key, x, layers):
        first = jax.tree.map(lambda a: a[0], layers)

        def init(key):
            variables = {}

            def call(*args, **kw):
                out, made = block.init_with_output(key, *args, **kw)
                variables.update(made)
                return out

            body(call, x, first)
            return variables["params"]

        boxed = jax.vmap(init)(jax.random.split(key, self.config.base_num_decoder_layers))
        return jax.tree.map(
            lambda box: box.add_axis(0, {linen.PARTITION_NAME: "layers"}),
            boxed,
            is_leaf=lambda x: hasattr(x, "add_axis"),
        )
