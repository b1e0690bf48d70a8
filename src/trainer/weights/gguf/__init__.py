"""GGUF files of llama.cpp: the model, its weights and its tokenizer in one file."""
