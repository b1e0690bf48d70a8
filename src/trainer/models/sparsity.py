"""N:M weight sparsity: selects the matrices of a model that are masked."""

import functools
import re

from flax import nnx

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.layers.sparse import GroupedSparse, Sparse
from trainer.models.quantization import HEAD, MTP, ROUTER
from trainer.products.plain import GroupedProduct, Kernel, MakeProduct, Product, Rules, make_plain


def is_masked(name: str) -> bool:
    """Returns whether weight sparsity masks the matrix `name`: it masks all matrices of the stacks except routers."""
    return not any(re.search(pattern, name) for pattern in (ROUTER, HEAD, MTP))


def with_masks(config: Config, rules: Rules) -> Rules:
    """Returns `rules` with a mask added to the product of each masked matrix. Without sparsity, returns `rules`."""
    if config.weight_sparsity_n is None:
        return rules
    return [
        (pattern, functools.partial(_masked, config.weight_sparsity_n, make))
        for pattern, make in [*rules, ("", make_plain)]
    ]


def _masked(n: int, make: MakeProduct, kernel: Kernel, *, rngs: nnx.Rngs) -> Product | GroupedProduct:
    product = make(kernel, rngs=rngs)
    if not is_masked(kernel.name):
        return product
    if hasattr(product, "store"):
        raise UserError(
            f"weight_sparsity_n={n}: {kernel.name} is stored in a format of its product that does not support masks"
        )
    return GroupedSparse(product, kernel) if kernel.groups else Sparse(product, kernel)
