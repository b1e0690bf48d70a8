"""What is minimized. Every term leaves as a sum and is divided by a weight that is known before the microbatch loop."""

from trainer.objectives.next_token import Objective

__all__ = ["Objective"]
