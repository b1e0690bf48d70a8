"""Runs stacks and single blocks, for NNX and Linen."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from trainer.layers.loop import Loop, run_layer, run_loop
from trainer.layers.param import axes_of
from trainer.layers.pipeline import run_pipeline
from trainer.layers.sown import Sown, capture


def run_stack(
    loop: Loop,
    apply: Sequence[Callable[..., Any]],
    variables: Sequence[Any],
    x: jax.Array,
    entries: Any,
    axes: Callable[[], Any],
    **how: Any,
) -> tuple[jax.Array, Any, Sown]:
    """Applies the layers of a stack in order, as a pipeline if the stack has one.

    A pipeline ignores the caches (`entries`), because generation runs without a pipeline. For the arguments see
    `layers.loop.run_loop`; for `axes`, and for `how` with a pipeline, see `layers.pipeline.run_pipeline`.
    """
    if loop.stack.pipeline is None:
        return run_loop(loop, apply, variables, x, entries, **how)
    x, sown = run_pipeline(loop, apply, variables, x, axes=axes, **how)
    return x, entries, sown


def run_module(module: nnx.Module, *args: Any) -> tuple[jax.Array, Sown]:
    """Runs the block `module` with `layers.loop.run_layer`. `args`: x, context, types and remat."""
    graphdef, *variables = nnx.split(module, nnx.Param, ...)
    types = args[2]
    return run_layer(lambda held, *given: capture(nnx.merge(graphdef, *held), types)(*given), variables, *args)


def run_modules(loop: Loop, module: nnx.Module, x: jax.Array, entries: Sequence[Any], **how: Any) -> Any:
    """Calls `run_stack` for `module`, an NNX module from `make_stack`."""
    # As in Linen, the parameters of all blocks precede all other state, so that NNX and Linen compile to the
    # same program.
    parts = [nnx.split(block, nnx.Param, ...) for block in loop.stack.modules(module)]
    graphdefs, *variables = zip(*parts, strict=True)

    def bound(graphdef: Any) -> Callable[..., Any]:
        return lambda params, rest, *args: capture(nnx.merge(graphdef, params, rest), loop.types)(*args)

    def axes() -> list[Any]:
        held = [nnx.to_pure_dict(params, lambda variable: variable) for params in variables[0]]
        named = [axes_of(variable, loop.stack.axes) for variable in jax.tree.leaves(held, is_leaf=_is_variable)]
        return jax.tree.leaves(named)

    return run_stack(loop, [bound(graph) for graph in graphdefs], variables, x, entries, axes, **how)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
