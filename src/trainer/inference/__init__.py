"""Generating text with a trained model."""
