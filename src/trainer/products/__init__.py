"""Products with weights: all products with parameter matrices are computed here.

A layer takes a `MakeProduct` and makes one product for each of its matrices. `plain` is the default; a quantized
product casts or scales its operands, and one with an adapter is an `nnx.Module` with its own parameters. The matrices
of experts have products of groups of rows (`MakeGrouped`), which have no parameters of their own.
"""

from trainer.products.plain import (
    EarlyReduction,
    GroupedProduct,
    MakeGrouped,
    MakeProduct,
    Product,
    grouped_product,
    in_dtype,
    plain,
    plain_grouped,
    product,
    stored,
)

__all__ = [
    "EarlyReduction",
    "GroupedProduct",
    "MakeGrouped",
    "MakeProduct",
    "Product",
    "grouped_product",
    "in_dtype",
    "plain",
    "plain_grouped",
    "product",
    "stored",
]
