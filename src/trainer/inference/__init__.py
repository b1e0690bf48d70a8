"""Running a trained model."""

from trainer.inference.sample import sample
from trainer.inference.text import prompt_tokens, sample_text

__all__ = ["prompt_tokens", "sample", "sample_text"]
