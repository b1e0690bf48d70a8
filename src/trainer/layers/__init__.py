"""NNX modules. They take plain arguments and name each axis by its meaning.

Letters in shapes are those of `trainer.ops`. `dtype` is the dtype of activations and matrix products, `weight_dtype`
that of the stored parameter. A dropout `key` of None means no dropout; `row_b` is each row's index in the global batch.
"""
