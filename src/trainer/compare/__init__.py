"""Compares two programs, a program with a record of one, or two checkpoints: whether they are equal, where they first
differ, and by how much."""

from trainer.compare.checkpoints import compare_checkpoints
from trainer.compare.difference import BITS, Tolerance
from trainer.compare.programs import compare_programs, record_program
from trainer.compare.record import Record
from trainer.compare.report import Comparison, Quantity, Report

__all__ = [
    "BITS",
    "Comparison",
    "Quantity",
    "Record",
    "Report",
    "Tolerance",
    "compare_checkpoints",
    "compare_programs",
    "record_program",
]
