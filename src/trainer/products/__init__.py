"""Products with weights: all products with parameter matrices are computed here.

`Rules` over canonical names choose the product of each kernel (`layers.matrices.choose_products`). The default is the
plain product; a quantized product casts or scales its operands, and one with an adapter is an `nnx.Module` with
its own parameters. The matrices of experts have products of groups of rows.
"""

from trainer.products.context import Context
from trainer.products.plain import (
    EarlyReduction,
    GroupedProduct,
    Kernel,
    MakeProduct,
    Product,
    Rules,
    grouped_product,
    in_dtype,
    make_plain,
    make_wide,
    maker,
    product,
    stored,
)

__all__ = [
    "Context",
    "EarlyReduction",
    "GroupedProduct",
    "Kernel",
    "MakeProduct",
    "Product",
    "Rules",
    "grouped_product",
    "in_dtype",
    "make_plain",
    "make_wide",
    "maker",
    "product",
    "stored",
]
