"""The GPT-3 family."""
