"""Limits for the contents of untrusted files. docs/guides/weights.md has a table of them.

They are far above the values in published files, and low enough that a small file takes neither minutes nor all memory.
"""

# JSON. For comparison: the index of a model of 100,000 tensors has 10 MB.
JSON_BYTES, JSON_DEPTH = 64 << 20, 64
# Any other file that is read as a whole. The largest tokenizer.json of a published model has 33 MB.
FILE_BYTES = 1 << 28
# Counts in config.json. Layers that differ within a period are compiled one by one.
LAYERS, PERIOD, EXPERTS, MODULES = 4096, 64, 4096, 64
# quantization_config: groups, regular expressions, their characters, and digits of a number of repetitions in them.
GROUPS, PATTERNS, PATTERN_CHARACTERS, REPETITION_DIGITS = 1024, 100, 200, 2
# Chat templates, for one conversation: characters of a template; of a text or list that it makes, and of all these
# together; digits in a format, bits of an integer, operands of ** and digits of round; iterations of its loops and
# calls; seconds of CPU time.
TEMPLATE_CHARACTERS = 1 << 17
MADE_CHARACTERS, MADE_TOGETHER, RENDERED_CHARACTERS = 1 << 26, 1 << 31, 1 << 26
FORMAT_DIGITS, INTEGER_BITS, OPERAND, ROUND_DIGITS = 3, 1 << 14, 1000, 100
TURNS, SECONDS = 1 << 26, 2.5
# A tokenizer.json: how many times as long its normalizer can make a text, the characters that it can add to any, and
# its steps.
GROWTH, ADDED_CHARACTERS, NORMALIZERS = 4096, 4096, 64
# Parquet and Arrow: what is compressed may have this many bytes, or become this many times as large. Bytes of the
# values that are read at once, if one may be repeated.
UNPACKED_BYTES, UNPACKED_RATIO, TOGETHER_BYTES = 256 << 20, 200, 1 << 28
# A GGUF file: keys and tensors, texts of all lists together, bytes of a name, and axes of a tensor. The header has at
# most FILE_BYTES.
GGUF_ENTRIES, GGUF_STRINGS, GGUF_NAME_BYTES, GGUF_AXES = 1 << 16, 1 << 22, 1 << 16, 4
# Characters of a token of sentencepiece in it, and of all together. Gemma's have 1.7 million.
PIECE_CHARACTERS, PIECES_CHARACTERS = 1024, 1 << 22
# One text of a data set.
TEXT_BYTES = 1 << 30
