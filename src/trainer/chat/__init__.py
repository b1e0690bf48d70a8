"""Conversations: templates, which tokens are trained, pairs of answers. It loads no JAX; import from its files."""
