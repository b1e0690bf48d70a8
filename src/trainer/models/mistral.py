"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama's block; its first version slides a window over 4096 tokens."""

from trainer.models.llama2 import Block

__all__ = ["Block"]
