"""Conversations: templates, masks of trained tokens, pairs of answers. Import from its modules; none loads JAX."""
