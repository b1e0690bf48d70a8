"""Computes all products of activations with parameter matrices.

`plain.Rules`, which match canonical names, choose the product of each kernel (`layers.matrices.choose_products`). The
default is the plain product. A quantized product casts or scales its operands. A product with an adapter is an
`nnx.Module` with parameters. Matrices of experts have grouped products.
"""
