"""Families whose matrices are stored as each of Qwix's types, with a product that dequantizes, as a user can write
them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
from qwix import QArray, dequantize
from qwix._src.core.qarray import HowToQuantize, quantize
from qwix._src.providers.ptq import WithAux
from qwix.contrib import padded_ptq
from qwix.contrib.awq import WithAwqScale
from qwix.contrib.padded_ptq import PaddedQArray
from qwix.contrib.smooth_quant import WithSqScale
from stored_int8 import of_block

from trainer.models.llama2 import block as llama2
from trainer.models.mixtral.family import Block
from trainer.ops.paths import name_of
from trainer.products.plain import grouped_product, product

MATRICES = r"mlp/.*/kernel$|self_attention/(query|key|value)/kernel$"  # matrices with one input axis
TILE = 4  # inputs that share a scale
PADDED = 6  # divides neither 16 nor 32


def how(kernel, qtype=jnp.int8, inputs=0, tile=TILE):
    outputs = tuple(axis for axis in range(kernel.ndim) if axis != inputs)
    return HowToQuantize(qtype=qtype, channelwise_axes=outputs, tiled_axes={inputs: tile})


def asymmetric(kernel):
    """A QArray with zero points."""
    return quantize(kernel, dataclasses.replace(how(kernel), calibration_method="minmax"))


def padded(kernel):
    return padded_ptq.quantize(kernel, how(kernel, tile=PADDED))


def with_aux(kernel):
    return WithAux(array=quantize(kernel, how(kernel)), how=how(kernel))


def _of_inputs(kernel):
    """Returns a scale for each input, and the kernel times this scale."""
    scale = 1 + jnp.arange(kernel.shape[0], dtype=jnp.float32) / 8
    return scale, kernel * jax.lax.broadcast_in_dim(scale, kernel.shape, (0,))


def with_awq(kernel):
    scale, scaled = _of_inputs(kernel)
    return WithAwqScale(array=quantize(scaled, how(kernel)), how=how(kernel), awq_scale=scale, contracting_axis=0)


def with_sq(kernel):
    scale, scaled = _of_inputs(kernel)
    inverse = 1 / scale
    return WithSqScale(array=quantize(scaled, how(kernel)), how=how(kernel), inv_sq_scale=inverse, contracting_axis=0)


STORES = {
    "qarray": lambda kernel: quantize(kernel, how(kernel)),
    "asymmetric": asymmetric,
    "padded": padded,
    "with_aux": with_aux,
    "with_awq": with_awq,
    "with_sq": with_sq,
    "int4": lambda kernel: quantize(kernel, how(kernel, jnp.int4)),
    "nf4": lambda kernel: quantize(kernel, how(kernel, "nf4")),
    "fp8": lambda kernel: quantize(kernel, how(kernel, jnp.float8_e4m3fn)),
}


def dequantized(stored, dtype):
    """Returns the dequantized values of any of the types. A type's static fields say how."""
    match stored:
        case PaddedQArray():
            # qwix.contrib.padded_ptq.dequantize refuses unpadded integers if a tile is incomplete.
            whole = padded_ptq.pad_to_shape(stored.qvalue, stored.padded_shape)
            values = dequantize(dataclasses.replace(stored, qvalue=whole)).astype(dtype)
            return values[tuple(map(slice, stored.original_shape))]
        case QArray():
            return dequantize(stored).astype(dtype)
        case WithAwqScale():
            factor = 1 / stored.awq_scale
        case WithSqScale():
            factor = stored.inv_sq_scale
        case WithAux():
            return dequantized(stored.array, dtype)
    values = dequantized(stored.array, dtype)
    return values * jax.lax.broadcast_in_dim(factor.astype(dtype), values.shape, (stored.contracting_axis,))


class Dequantizing:
    """A product whose kernel is stored by one of STORES."""

    def __init__(self, store, read=dequantized):
        self.store, self.read = store, read

    def __call__(self, x, inputs, kernel, reduce_early, context):
        return product(x, inputs, self.read(kernel, x.dtype))


class GroupedDequantizing(Dequantizing):
    """The same for experts, with kernels [groups, in, out]."""

    def __call__(self, x, kernel, sizes, context):
        return grouped_product(x, self.read(kernel, x.dtype), sizes)


def rule(names, store, read=dequantized):
    return names, lambda kernel, *, rngs: (GroupedDequantizing if kernel.groups else Dequantizing)(store, read)


def with_doubled_gradient(stored, dtype):
    """Returns the same values, but the gradient of the scale is doubled."""
    return dequantized(dataclasses.replace(stored, scale=2 * stored.scale - jax.lax.stop_gradient(stored.scale)), dtype)


globals().update({name: of_block(llama2.Block, rule(MATRICES, store)) for name, store in STORES.items()})
# Every type in one model.
MIXED = {
    "wi_0": "qarray",
    "wi_1": "padded",
    "wo": "with_awq",
    "query": "with_sq",
    "key": "with_aux",
    "value": "asymmetric",
}
_rules = [rule(f"/{name}/kernel$", STORES[store]) for name, store in MIXED.items()]
mixed = of_block(llama2.Block, *_rules)
narrower = of_block(llama2.Block, rule("/wi_0/kernel$", STORES["int4"]), *_rules)  # one matrix as int4 instead of int8
planted = of_block(llama2.Block, rule("/wi_0/kernel$", STORES["qarray"], with_doubled_gradient), *_rules)
experts = of_block(Block, rule("MoeBlock_0/w", lambda kernel: quantize(kernel, how(kernel, inputs=1))))
FROZEN = {"trainable_parameters_mask": "[scale$,embedding,norm]"}  # trains everything but the integers


def stored_by(name, params):
    """Returns the canonical `params` of a plain model in the form of the family `name`."""

    def one(path, kernel):
        if not re.search(MATRICES, name_of(path)):
            return kernel
        return jax.vmap(STORES[MIXED[path[-2].key] if name == "mixed" else name])(kernel)

    return jax.tree_util.tree_map_with_path(one, params)


def as_floats(params):
    """Returns canonical parameters with each kernel dequantized to one float32 array."""

    def one(value):
        return jax.vmap(lambda kernel: dequantized(kernel, jnp.float32))(value) if is_stored(value) else value

    return jax.tree.map(one, params, is_leaf=is_stored)


def is_stored(value):
    return isinstance(value, QArray | WithAux)
