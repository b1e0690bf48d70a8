"""Running a trained model."""

from trainer.inference.sample import sample

__all__ = ["sample"]
