"""Reads and writes models in the formats of Hugging Face, PEFT, MaxText, llama.cpp and this trainer."""
