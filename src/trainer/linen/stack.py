"""The decoder's stacks in Linen: `linen.scan` and `linen.remat` over the configured blocks."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from trainer.config.capabilities.pipeline_keys import microbatches
from trainer.config.keys import Config
from trainer.layers.cache import Cache
from trainer.layers.loop import Loop
from trainer.layers.param import REST
from trainer.layers.run import run_stack
from trainer.layers.sown import Sown
from trainer.layers.stack import MakeBlock
from trainer.linen.bridge import is_box, unboxed
from trainer.linen.layer import COLLECTIONS, apply_layer, call_layer, make_layer
from trainer.models.remat import remat_policy
from trainer.models.transformer import Types, casts_in_loop, loop_options, run_stacks
from trainer.ops.random import seed_key
from trainer.products.context import Context
from trainer.sharding import off_mesh


def initializing(config: Config) -> Config:
    """Returns `config`, modified for Linen's initialization, which traces the model with rows of one token.

    The attention op is replaced, because attention kernels refuse rows of one token. Parameters do not depend on the
    op.
    """
    return Config({**config, "attention": "dot_product"})


class Pattern(linen.Module):
    """See `layers.stack.Pattern`."""

    config: Config
    blocks: Sequence[MakeBlock]
    paths: Sequence[str]

    def setup(self):
        for i, (block, path) in enumerate(zip(self.blocks, self.paths, strict=True)):
            setattr(self, f"layers_{i}", make_layer(self.config, block, f"decoder/{path}"))


class Stacks(linen.Module):
    """All stacks of a decoder. For rolled and unrolled loops alike, a stack's variables are stacked on axis 0."""

    config: Config

    @linen.compact
    def run_layers(self, x, cache: Cache | None, context: Context, types: Types) -> tuple[jax.Array, Any, Sown]:
        def run(loop, x, entries):
            lifted = self.is_initializing() or (self.config.scan_layers and loop.stack.pipeline is None)
            return (self._scan if lifted else self._applied)(loop, x, entries)

        return run_stacks(self.config, run, x, cache, context, types)

    def _scan(self, loop: Loop, x, entries):
        stack, policy = loop.stack, remat_policy(self.config)

        def layer(block, x, entries, number):
            call = functools.partial(call_layer, block, casts_in_loop(self.config), loop.types, number)
            return loop.layer(call, x, entries, number)

        if policy is not None:
            layer = linen.remat(layer, prevent_cse=False, policy=policy)

        def turn(module, carry, numbers):
            return loop.turn([functools.partial(layer, block) for block in stack.modules(module)], carry, numbers)

        scan = turn
        for axis, size in zip(reversed(stack.axes), reversed(stack.sizes), strict=True):
            scan = linen.scan(
                scan,
                variable_axes=dict.fromkeys(COLLECTIONS, 0),
                split_rngs={"params": True},
                length=size,
                metadata_params={linen.PARTITION_NAME: axis},
            )
        if len(stack.blocks) == 1:
            module = make_layer(self.config, stack.blocks[0], f"decoder/{stack.name}", name=stack.name)
        else:
            module = Pattern(self.config, stack.blocks, stack.paths, name=stack.name)
        (x, entries), sown = scan(
            module, (x, list(entries)), [numbers.reshape(stack.sizes) for numbers in loop.numbers()]
        )
        return x, entries, sown

    def _applied(self, loop: Loop, x, entries):
        # Runs the stack as NNX does, in a loop or pipeline, with the variables that linen.scan created.
        stack, held = loop.stack, linen.unbox(self.variables)
        variables = [[_at(held.get(name, {}), path) for path in stack.paths] for name in COLLECTIONS]
        made = zip(stack.blocks, stack.paths, strict=True)
        layers = [make_layer(self.config, block, f"decoder/{path}", parent=None) for block, path in made]
        apply = [functools.partial(_apply, layer, loop.types) for layer in layers]

        def axes() -> list[Any]:
            made = jax.eval_shape(lambda: init_stacks(self.config, seed_key(0)))["params"]
            boxes = [_at(made, path) for path in stack.paths]
            return [unboxed(leaf, stack.axes)[1] for leaf in jax.tree.leaves(boxes, is_leaf=is_box)]

        return run_stack(loop, apply, variables, x, entries, axes, **loop_options(self.config, stack))


def init_stacks(config: Config, key: jax.Array) -> Mapping[str, Any]:
    """Returns the initial variables of the stacks, in boxes that contain their logical axes."""
    rows = microbatches(config)  # a pipeline needs a row for each microbatch
    ids, x = jnp.zeros((rows, 1), jnp.int32), jnp.zeros((rows, 1, config.base_emb_dim), config.dtype)
    context = Context(ids, ids, rows=ids[:, 0], key=None)
    # The bridge also runs this code within a training step, whose mesh cannot shard rows of one token.
    with off_mesh():
        stacks = Stacks(initializing(config), parent=None)
        return stacks.init(key, x, None, context, (), method="run_layers")


def _at(variables: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Returns the variables of the block at `path`; {} if the block has none."""
    for name in path.split("/"):
        variables = variables.get(name, {})
    return variables


def _apply(layer: linen.Module, types: Types, params: Any, rest: Any, *args: Any) -> Any:
    return apply_layer(layer, types, {"params": params, REST: rest}, *args)
