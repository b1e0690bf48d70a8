"""The OLMo 2 family."""
