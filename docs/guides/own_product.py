"""A custom product: low-rank adapters (Hu et al. 2021, arXiv:2106.09685) for two matrices of Mixtral.

    python -m trainer.train base.yml decoder_block=docs.guides.own_product:FAMILY num_experts=4 \
        base_moe_mlp_dim=256 trainable_parameters_mask=[product] dataset_type=synthetic steps=20
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.layers.param import param
from trainer.models.mixtral.family import FAMILY as MIXTRAL
from trainer.products.plain import Kernel, grouped_product, product

RANK = 4


class Adapter(nnx.Module):
    """The plain product plus a low-rank product, which is initially zero."""

    def __init__(self, kernel: Kernel, *, rngs: nnx.Rngs):
        groups = (kernel.groups,) if kernel.groups else ()
        first = len(groups) + len(kernel.in_shape)  # the kernel's first output axis
        inputs, outputs = (*groups, *kernel.in_shape, RANK), (*groups, RANK, *kernel.out_shape)
        down = 0.02 * jax.random.normal(rngs.params(), inputs)
        self.down = param(down, (*kernel.names[:first], None))
        self.up = param(jnp.zeros(outputs), (*kernel.names[: len(groups)], None, *kernel.names[first:]))

    def __call__(self, x, inputs, kernel, reduce_early, context):
        low = product(x, inputs, self.down.get_value())
        return product(x, inputs, kernel, reduce_early) + product(low, 1, self.up.get_value())


class GroupedAdapter(Adapter):
    """`Adapter` for the stacked matrices of experts."""

    def __call__(self, x, kernel, sizes, context):
        low = grouped_product(x, self.down.get_value(), sizes)
        return grouped_product(x, kernel, sizes) + grouped_product(low, self.up.get_value(), sizes)


def products(config):
    """Returns pairs of a pattern and a class. A matrix gets the class of the first pattern in its canonical name."""
    return [("self_attention/query/kernel", Adapter), ("MoeBlock_0/wi_0", GroupedAdapter)]


FAMILY = dataclasses.replace(MIXTRAL, products=products)
