"""Stacks of blocks.

A decoder is a list of stacks. `layers.run` runs each stack separately, as a loop or as a pipeline. A stack's
parameters are always stacked over layers: `scan_layers` determines whether the loop is rolled or unrolled, but does not
change the names or shapes of parameters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from trainer.config.capabilities.pipeline_keys import Pipeline
from trainer.sharding import LAYERS, STACKED

# Makes a block: a class, or a `functools.partial` of one.
MakeBlock = Callable[..., Any]


@dataclass(frozen=True)
class Stack:
    """A part of a decoder: a pattern of consecutive blocks, `blocks`, that is repeated `count` times.

    The names of its parameters begin with `name`. If the pattern has several blocks, their parameters are in
    name/layers_0, name/layers_1, ... `pipeline`: how the repetitions are divided into stages; None for no pipeline.
    """

    name: str
    blocks: tuple[MakeBlock, ...]
    count: int
    pipeline: Pipeline | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The logical names of the leading axes of the stack's parameters."""
        return (LAYERS,) if self.pipeline is None else STACKED

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of `axes`. Flattened in row-major order, these axes index the repetitions of the pattern."""
        return (self.count,) if self.pipeline is None else self.pipeline.sizes

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.count * len(self.blocks)

    @property
    def paths(self) -> list[str]:
        """The path of each block's parameters in the decoder: name, or name/layers_0, name/layers_1, ..."""
        return [self.name] if len(self.blocks) == 1 else [f"{self.name}/layers_{i}" for i in range(len(self.blocks))]

    def modules(self, module: Any) -> list[Any]:
        """Returns the module of each block, given the module of the stack."""
        if len(self.blocks) == 1:
            return [module]
        return [getattr(module, f"layers_{i}") for i in range(len(self.blocks))]


class Pattern(nnx.Module):
    """A module of consecutive blocks, which are its attributes layers_0, layers_1, ..."""

    def __init__(self, blocks: Sequence[MakeBlock], *args: Any):
        for i, block in enumerate(blocks):
            setattr(self, f"layers_{i}", block(*args))


def make_stack(stack: Stack, blocks: Sequence[MakeBlock], rngs: nnx.Rngs) -> nnx.Module:
    """Returns one module with all repetitions of the pattern `blocks`. Each block is made by `block(rngs)`.

    The parameters have the leading axes of `stack`. The initial values do not depend on the division into pipeline
    stages.
    """

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return blocks[0](rngs) if len(blocks) == 1 else Pattern(blocks, rngs)

    for name in reversed(stack.axes):
        named = nnx.transform_metadata(make, in_axes=0, out_axes=0, partition=name)
        make = nnx.vmap(named, in_axes=0, out_axes=0)
    assert math.prod(stack.sizes) == stack.count
    return make(rngs.split(stack.sizes if stack.pipeline else stack.count))
