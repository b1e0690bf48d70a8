"""The DeepSeek family."""
