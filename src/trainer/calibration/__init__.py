"""Quantization of a trained model, layer by layer, calibrated with statistics of the kernels' inputs."""
