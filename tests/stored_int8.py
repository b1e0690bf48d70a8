"""Families `dense` and `experts` with matrices stored as int8 with scales, as a user can write them."""

import jax
import jax.numpy as jnp

from trainer.layers.stack import Stack
from trainer.models.family import Family
from trainer.models.llama2 import block as llama2
from trainer.models.mixtral.family import Block
from trainer.products.plain import grouped_product, product


def dequantized(kernel, dtype):
    return kernel["q"].astype(dtype) * kernel["scale"].astype(dtype)


class Int8:
    """A product whose kernel is stored as {"q": int8 [*in, *out], "scale": float32 with length 1 on the input axes}."""

    def __init__(self, *inputs):
        self.inputs = inputs  # the axes of the inputs

    def store(self, kernel):
        scale = jnp.abs(kernel).max(self.inputs, keepdims=True).astype(jnp.float32) / 127
        return {"q": jnp.round(kernel / scale).astype(jnp.int8), "scale": scale}

    def __call__(self, x, inputs, kernel, reduce_early, context):
        return product(x, inputs, dequantized(kernel, x.dtype))


class GroupedInt8(Int8):
    def __call__(self, x, kernel, sizes, context):
        return grouped_product(x, dequantized(kernel, x.dtype), sizes)


def make(kernel, *, rngs):
    return GroupedInt8(1) if kernel.groups else Int8(*range(len(kernel.in_shape)))


def of_block(block, *rules):
    stacks = lambda config: [Stack("layers", (block,), config.base_num_decoder_layers)]  # noqa: E731
    return Family(stacks, products=lambda config: rules)


dense, experts = of_block(llama2.Block, ("kernel$", make)), of_block(Block, ("kernel$|MoeBlock_0/w", make))
FROZEN = {"trainable_parameters_mask": "[scale$,embedding]"}  # trains everything but the integers


def as_floats(params):
    """Returns `params` with each kernel dequantized to one float32 array."""
    return jax.tree.map(
        lambda leaf: dequantized(leaf, jnp.float32) if isinstance(leaf, dict) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, dict) and "q" in leaf,
    )
