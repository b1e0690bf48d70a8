"""Turns sources of text into batches of tokens."""
