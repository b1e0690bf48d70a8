"""Folders of Hugging Face: config.json, safetensors, quantized matrices."""
