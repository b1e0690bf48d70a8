"""Products with weights: all matrices of parameters are multiplied here.

A layer is given a `MakeProduct` and makes one product for each of its matrices. `plain` is the default; a quantized
product casts or scales its operands, and one with an adapter is an `nnx.Module` that holds parameters of its own.
"""

from trainer.products.plain import MakeProduct, Product, plain, product

__all__ = ["MakeProduct", "Product", "plain", "product"]
