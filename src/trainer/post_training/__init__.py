"""What happens to a trained model: quantization by calibration, supervised fine-tuning.

Import from its files: those on conversations do not load JAX.
"""
