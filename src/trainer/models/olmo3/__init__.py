"""The OLMo 3 family."""
