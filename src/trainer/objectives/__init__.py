"""Objectives: the losses that training minimizes, and other sums that it reports."""
