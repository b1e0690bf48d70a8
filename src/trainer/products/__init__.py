"""Products with weights: all products with parameter matrices are computed here.

A layer takes a `MakeProduct` and makes one product for each of its matrices. `plain` is the default; a quantized
product casts or scales its operands, and one with an adapter is an `nnx.Module` with its own parameters.
"""

from trainer.products.plain import MakeProduct, Product, Settle, plain, product

__all__ = ["MakeProduct", "Product", "Settle", "plain", "product"]
