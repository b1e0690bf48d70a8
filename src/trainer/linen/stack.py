"""The decoder stack in Linen: `linen.scan` and `linen.remat` over the configured block."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from flax import linen
from jax.ad_checkpoint import checkpoint_name

from trainer.layers.context import Context
from trainer.layers.remat import LAYER_INPUT
from trainer.layers.sown import Sown, with_output
from trainer.linen.layer import apply_layer, call_layer, make_layer
from trainer.models.remat import remat_policy
from trainer.models.transformer import Types, casts_in_loop


def initializing(config: Any) -> ml_collections.FrozenConfigDict:
    """`config` for an initialization, which Linen traces with one token.

    Parameters do not depend on the attention op, but kernels refuse such a length, or a row that no mesh splits. Nor
    do they depend on how the loop is compiled: they are always made by the scan.
    """
    return ml_collections.FrozenConfigDict({**config, "attention": "dot_product", "scan_layers": True})


class Stack(linen.Module):
    """The blocks; their parameters are stacked on axis 0 under the name "layers", rolled loop or not."""

    config: Any

    @linen.compact
    def run_layers(self, x, cache, context: Context, types: Types) -> tuple[jax.Array, Any, Sown]:
        """What `layers.stack.run_stack` does: the last block's x, the cache, and what the blocks sowed."""

        def body(call, x, layer):
            index, cache = layer
            x = checkpoint_name(x, LAYER_INPUT)
            (x, cache), sown = call(types, index, x, cache, context.at(index))
            return x, (cache, with_output(sown, types, x))

        layers = jnp.arange(self.config.base_num_decoder_layers), cache
        if self.config.scan_layers:
            x, (cache, sown) = self._scan(body, x, layers)
        else:
            x, (cache, sown) = self._unroll(body, x, layers)
        return x, cache, sown

    def _scan(self, body, x, layers):
        cast_inside = casts_in_loop(self.config)

        def bound(block, x, layer):
            return body(functools.partial(call_layer, block, cast_inside), x, layer)

        if (policy := remat_policy(self.config)) is not None:
            bound = linen.remat(bound, prevent_cse=False, policy=policy)
        scan = linen.scan(
            bound,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.config.base_num_decoder_layers,
            metadata_params={linen.PARTITION_NAME: "layers"},
        )
        return scan(make_layer(self.config, name="layers"), x, layers)

    def _unroll(self, body, x, layers):
        # The NNX stack's loop, over slices cut outside of the checkpointed body, of the tree that linen.scan makes.
        block = make_layer(self.config, parent=None)
        params = linen.unbox(self.get_variable("params", "layers"))

        def step(params, x, layer):
            return body(functools.partial(apply_layer, block, params), x, layer)

        if (policy := remat_policy(self.config)) is not None:
            step = jax.checkpoint(step, prevent_cse=True, policy=policy)
        outputs = []
        for i in range(self.config.base_num_decoder_layers):
            params_i, layer = jax.tree.map(lambda a, i=i: a[i], (params, layers))
            x, output = step(params_i, x, layer)
            outputs.append(output)
        return x, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)
