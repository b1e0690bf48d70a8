"""Objectives: the losses that training minimizes, and other sums that it reports."""

from trainer.objectives.base import (
    Batch,
    Evaluation,
    Field,
    Frozen,
    Mean,
    Objective,
    Sums,
    Weights,
    batch_fields,
    placed_fields,
    prepared,
)
from trainer.objectives.forward import TokenLogProbs, hidden_states, target_log_probs
from trainer.objectives.multi_token import MultiToken
from trainer.objectives.next_token import NextToken
from trainer.objectives.reference import first_parameters, reference_parameters
from trainer.objectives.registry import make_objective

__all__ = [
    "Batch",
    "Evaluation",
    "Field",
    "Frozen",
    "Mean",
    "MultiToken",
    "NextToken",
    "Objective",
    "Sums",
    "TokenLogProbs",
    "Weights",
    "batch_fields",
    "first_parameters",
    "hidden_states",
    "make_objective",
    "placed_fields",
    "prepared",
    "reference_parameters",
    "target_log_probs",
]
