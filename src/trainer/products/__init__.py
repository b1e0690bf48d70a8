"""All products of activations with parameter matrices are computed here.

`Rules` over canonical names choose the product of each kernel (`layers.matrices.choose_products`). The default is the
plain product. A quantized product casts or scales its operands. A product with an adapter is an `nnx.Module` with
parameters. Matrices of experts have grouped products.
"""
