"""Quantization of a trained model, layer by layer, with statistics of what its kernels multiply."""
