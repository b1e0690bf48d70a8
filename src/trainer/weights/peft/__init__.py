"""Folders of Hugging Face's PEFT: adapters."""
