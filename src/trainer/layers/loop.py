"""The loop over the layers of a stack, and its rematerialization."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from trainer.config.capabilities.remat_tensors import LAYER_INPUT
from trainer.layers.cache import Cache, Layers
from trainer.layers.remat import Policy
from trainer.layers.sown import Sown, with_output
from trainer.layers.stack import Stack
from trainer.products.context import Context


def cast_in_loop(block: Any, index: jax.Array, dtype: jnp.dtype) -> Any:
    """Returns `block` (a module or its state) with equal values, made so that XLA cannot hoist casts to `dtype`.

    If a loop over stacked float32 weights casts them to bfloat16, XLA's TPU compiler hoists the casts of all layers out
    of the loop, keeps the results for the whole step, and transposes the float32 weights to the layout that the
    products in the loop prefer. This function multiplies the weights by a one that is computed from the loop's `index`,
    so the cast depends on the index and stays in the loop. Multiplication by one is exact, so no bit changes. The
    function also fixes the layout to row-major.
    """
    one = jnp.where(index < 0, 0.0, 1.0)

    def tied(leaf: jax.Array) -> jax.Array:
        if leaf.ndim < 2 or leaf.dtype.itemsize <= dtype.itemsize:
            return leaf
        return with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim)))) * one.astype(leaf.dtype)

    return jax.tree.map(tied, block)


class Loop(NamedTuple):
    """The arguments of a loop over the layers of a stack, shared by NNX and Linen.

    Attributes:
      stack: the stack.
      first: the number of the stack's first layer in the model, int or an array [].
      context: the context of all layers; layer i of the model gets `context.at(i)`.
      types: the sown types to capture.
      cache: a template for the layers' caches (`layers.cache`); its `entries` and `layer` are replaced.
      by_layer: whether the cache entries are `Layers`.
    """

    stack: Stack
    first: Any
    context: Context
    types: tuple[type[nnx.Variable], ...] = ()
    cache: Cache = Cache(None)
    by_layer: bool = False

    def numbers(self) -> list[jax.Array]:
        """Returns, for each block of the pattern, the numbers [count] of its layers."""
        period = len(self.stack.blocks)
        return [self.first + jnp.arange(i, self.stack.layers, period) for i in range(period)]

    def layer(self, call: Callable[..., Any], x: jax.Array, entries: Any, number: jax.Array) -> tuple[Any, Any, Sown]:
        """Runs one layer. Returns the layer's output, the updated `entries` of the stack's cache, and the sown values.

        `call(x, cache, context) -> (x, cache), sown` runs the block of the layer.
        """
        x = checkpoint_name(x, LAYER_INPUT)
        cache = None
        if entries is not None:
            layer = 0 if self.by_layer else (number - self.first) // len(self.stack.blocks)
            cache = dataclasses.replace(self.cache, entries=entries, layer=layer)
        (x, cache), sown = call(x, cache, self.context.at(number))
        return x, None if cache is None else cache.entries, with_output(sown, self.types, x)

    def turn(self, layers: Sequence[Callable[..., Any]], carry: tuple[Any, Any], numbers: Any) -> tuple[Any, Sown]:
        """Runs one iteration of the loop: the `layers` in order, each called as `layer(x, entries, number)`.

        `carry`: x, and the cache entries of each block of the pattern. Returns the new carry and the sown values.
        """
        x, entries = carry
        after: list[Any] = []
        sown: dict[str, dict[str, jax.Array]] = {kind.__name__: {} for kind in self.types}
        for layer, block, cache, number in zip(layers, self.stack.paths, entries, numbers, strict=True):
            x, cache, sown_values = layer(x, cache, number)
            after.append(cache)
            for name, values in sown_values.items():
                sown[name] |= {f"{block}/{path}": value for path, value in values.items()}
        return (x, after), sown


def run_loop(
    loop: Loop,
    apply: Sequence[Callable[..., Any]],
    variables: Sequence[Any],
    x: jax.Array,
    entries: Sequence[Any],
    *,
    scan: bool,
    remat: Policy | None,
    cast_inside: bool = False,
) -> tuple[jax.Array, Sequence[Any], Sown]:
    """Applies the layers of a stack in order, in a loop.

    Args:
      apply: for each block of the pattern, `apply(*variables, x, cache, context) -> (x, cache), sown` for one layer.
      variables: two lists: the stacked parameters, and all other stacked variables. Each list has one entry per block
        of the pattern.
      x: the first layer's input.
      entries: for each block of the pattern, its stacked cache (as `Layers` if `loop.by_layer` and not `scan`) or None.
      scan: whether to roll the loop; otherwise it is unrolled.
      remat: the policy for what each layer saves for its backward pass (`layers.remat.make_policy`); None: it saves
        everything.
      cast_inside: whether a rolled loop casts its weights inside (`cast_in_loop`).

    Returns:
      The last layer's output, the new caches, and the sown values with a leading axis of iterations.
    """

    def bound(block: Callable[..., Any]) -> Callable[..., Any]:
        def layer(variables: Any, x: jax.Array, entries: Any, number: jax.Array) -> tuple[Any, Any, Sown]:
            def call(*args: Any) -> Any:
                return block(*(cast_in_loop(variables, number, x.dtype) if cast_inside else variables), *args)

            return loop.layer(call, x, entries, number)

        # Each layer of a pattern is checkpointed separately, so the backward pass has temporaries of only one layer.
        return layer if remat is None else jax.checkpoint(layer, prevent_cse=not scan, policy=remat)

    layers = [bound(block) for block in apply]

    def body(carry: tuple[Any, Any], turn: tuple[Any, Any]) -> tuple[Any, Sown]:
        variables, numbers = turn
        return loop.turn(list(map(functools.partial, layers, zip(*variables, strict=True))), carry, numbers)

    stacked = list(variables), loop.numbers()
    if scan:
        (x, entries), sown = jax.lax.scan(body, (x, list(entries)), stacked)
        return x, entries, sown
    outputs, apart = [], []
    for i in range(loop.stack.count):
        held = [block.each[i] for block in entries] if loop.by_layer else list(entries)
        # The layer's variables are sliced outside of the checkpointed function, so a GPU saves the slices as inputs of
        # that function. For the cost see docs/benchmarks/gpu.md.
        (x, held), output = body((x, held), jax.tree.map(lambda a, i=i: a[i], stacked))
        outputs.append(output)
        apart.append(held)
        entries = entries if loop.by_layer else held
    if loop.by_layer:
        entries = [Layers(list(each)) for each in zip(*apart, strict=True)]
    return x, entries, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)


def run_layer(
    call: Callable[..., Any],
    variables: Any,
    x: jax.Array,
    context: Context,
    types: tuple[type[nnx.Variable], ...],
    remat: Policy | None,
) -> tuple[jax.Array, Sown]:
    """Applies a layer outside of the stacks, without a cache. Returns the layer's output and its sown values.

    `call(variables, x, cache, context) -> (x, cache), sown` runs the layer. `context`: the layer's context. `remat`:
    see `run_loop`.
    """

    def layer(variables: Any, x: jax.Array) -> tuple[jax.Array, Sown]:
        x = checkpoint_name(x, LAYER_INPUT)
        (x, _), sown = call(variables, x, None, context)
        return x, with_output(sown, types, x)

    return (layer if remat is None else jax.checkpoint(layer, policy=remat))(variables, x)
