"""Qwen3, dense (Qwen team 2025, arXiv:2505.09388): Llama's block with `use_qk_norm`."""

from trainer.models.llama2 import Block

__all__ = ["Block"]
