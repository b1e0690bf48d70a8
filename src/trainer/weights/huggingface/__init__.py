"""Hugging Face folders: config.json, safetensors, quantized matrices."""
