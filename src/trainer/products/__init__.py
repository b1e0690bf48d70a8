"""Products with weights: all products with parameter matrices are computed here.

`Rules` over canonical names choose the product of each kernel (`layers.matrices.choose_products`). The default is the
plain product; a quantized product casts or scales its operands, and one with an adapter is an `nnx.Module` with
its own parameters. The matrices of experts have products of groups of rows.
"""
