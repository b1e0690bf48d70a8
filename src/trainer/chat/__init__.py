"""Conversations as training data: chat templates, masks of trained tokens, and pairs of answers.

Import from the modules of this package; none of them loads JAX.
"""
