"""Compares two programs or two checkpoints: whether they are equal, where they first differ, and by how much."""

from trainer.compare.checkpoints import compare_checkpoints
from trainer.compare.difference import BITS, Tolerance
from trainer.compare.programs import compare_programs
from trainer.compare.report import Comparison, Quantity, Report

__all__ = ["BITS", "Comparison", "Quantity", "Report", "Tolerance", "compare_checkpoints", "compare_programs"]
