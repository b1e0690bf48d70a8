"""NNX modules. They take plain arguments instead of a configuration, and give each axis a logical name.

`trainer.ops` explains the letters in shapes. `dtype` is the dtype of activations and matrix products, `weight_dtype` is
the dtype of stored kernels and embedding tables; other parameters are float32 (`param.EXACT`). A dropout key
(`Context.key`) of None means no dropout.
"""
