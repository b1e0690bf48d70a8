"""A stack of equal blocks in NNX: the scan over layers and its rematerialization live here alone.

A block has the signature `block(x, cache, context) -> x, cache`. Its parameters are stacked on axis 0 whether the
loop is rolled or not, so `scan` decides how the loop is compiled and not what a parameter is called.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from trainer.layers.context import Context
from trainer.layers.remat import LAYER_INPUT, Policy
from trainer.layers.sown import Sown, capture, with_output

Block = TypeVar("Block", bound=nnx.Module)


def make_stack(make_block: Callable[[nnx.Rngs], Block], layers: int, rngs: nnx.Rngs) -> Block:
    """`layers` blocks as one block whose parameters have a leading axis of the logical name "layers"."""

    @nnx.vmap(in_axes=0, out_axes=0)
    @nnx.transform_metadata(in_axes=0, out_axes=0, partition="layers")
    def make(rngs: nnx.Rngs) -> Block:
        return make_block(rngs)

    return make(rngs.split(layers))


@jax.custom_vjp
def _in_order(leaf: jax.Array) -> jax.Array:
    """`leaf` with its axes in memory as they are written; its gradient may lie as it likes.

    In that order the gradient of a matrix that has 16 columns on a device would be padded to eight times its size.
    """
    return with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim))))


_in_order.defvjp(lambda leaf: (_in_order(leaf), None), lambda _, gradient: (gradient,))


def cast_in_loop(block: Any, index: jax.Array, dtype: jnp.dtype) -> Any:
    """`block`, a module or its state, with the same values, whose matrices can not be cast to `dtype` for all layers.

    In a loop over stacked float32 weights that are cast to bfloat16 inside, XLA's TPU compiler casts all layers before
    the loop and holds them through the step, and turns their order in memory into the one that the products inside
    like, in float32. A cast of what depends on the loop's `index` stays where it is, and the order is fixed here. A
    product with one is exact, so this changes no bit.
    """
    one = jnp.where(index < 0, 0.0, 1.0)

    def tied(leaf: jax.Array) -> jax.Array:
        if leaf.ndim < 2 or leaf.dtype.itemsize <= dtype.itemsize:
            return leaf
        return _in_order(leaf) * one.astype(leaf.dtype)

    return jax.tree.map(tied, block)


def run_stack(
    blocks: nnx.Module,
    x: jax.Array,
    cache: Any,
    context: Context,
    *,
    scan: bool,
    remat: Policy | None,
    cast_inside: bool = False,
    types: tuple[type[nnx.Variable], ...] = (),
) -> tuple[jax.Array, Any, Sown]:
    """Apply the blocks one after the other.

    Args:
      blocks: what `make_stack` made.
      x: the first block's input.
      cache: pytree with a leading layers axis, or None.
      context: what every block gets, layer i with `context.at(i)`'s key.
      scan: roll the loop, or unroll it.
      remat: what each block keeps for its backward pass (`layers.remat.make_policy`); None: everything.
      cast_inside: let a rolled loop cast its weights inside (`cast_in_loop`).
      types: sown types to capture.

    Returns:
      the last block's x, the new cache, and what was sown, with a leading layers axis.
    """
    graphdef, params = nnx.split(blocks)

    def body(x: jax.Array, layer: tuple[Any, ...]) -> tuple[jax.Array, tuple[Any, Sown]]:
        params, index, cache = layer
        x = checkpoint_name(x, LAYER_INPUT)
        if cast_inside:
            params = cast_in_loop(params, index, x.dtype)
        (x, cache), sown = capture(nnx.merge(graphdef, params), types)(x, cache, context.at(index))
        return x, (cache, with_output(sown, types, x))

    if remat is not None:
        body = jax.checkpoint(body, prevent_cse=not scan, policy=remat)
    layers = len(jax.tree.leaves(params)[0])
    stacked = (params, jnp.arange(layers), cache)
    if scan:
        x, (cache, sown) = jax.lax.scan(body, x, stacked)
        return x, cache, sown
    outputs = []
    for i in range(layers):
        # Cut outside of the checkpointed body: the backward pass then keeps no second copy of the parameters.
        x, output = body(x, jax.tree.map(lambda a, i=i: a[i], stacked))
        outputs.append(output)
    cache, sown = jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)
    return x, cache, sown
