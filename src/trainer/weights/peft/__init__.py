"""Adapters in folders of Hugging Face's PEFT."""
