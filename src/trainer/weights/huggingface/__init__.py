"""Reads and writes Hugging Face folders: config.json, safetensors files and quantized matrices."""
