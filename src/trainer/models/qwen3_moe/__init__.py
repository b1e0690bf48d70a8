"""Qwen3 with experts."""
