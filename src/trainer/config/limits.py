"""Limits for the contents of untrusted files. docs/guides/weights.md has a table of them.

They are far above the values in published files, and so low that a small file takes neither minutes nor all memory.
"""

# Bytes and nesting depth of JSON. For comparison: the index of a model with 100,000 tensors has 10 MB.
JSON_BYTES, JSON_DEPTH = 64 << 20, 64
# Bytes of any other file that is read at once. The largest tokenizer.json of a published model has 33 MB.
FILE_BYTES = 1 << 28
# Counts in config.json. PERIOD is low because layers that differ within a period are compiled one by one.
LAYERS, PERIOD, EXPERTS, MODULES = 4096, 64, 4096, 64
# quantization_config: groups, regular expressions, characters per expression, and digits of a repetition count.
GROUPS, PATTERNS, PATTERN_CHARACTERS, REPETITION_DIGITS = 1024, 100, 200, 2
# Chat templates, for one conversation. The characters of the template:
TEMPLATE_CHARACTERS = 1 << 17
# The size of one text or list that the template makes, of all these texts and lists together, and of the result:
MADE_CHARACTERS, MADE_TOGETHER, RENDERED_CHARACTERS = 1 << 26, 1 << 31, 1 << 26
# The digits of a width in a format, the bits of an integer, the operands of **, and the digits of round:
FORMAT_DIGITS, INTEGER_BITS, OPERAND, ROUND_DIGITS = 3, 1 << 14, 1000, 100
# Loop iterations and calls together, and seconds of CPU time:
TURNS, SECONDS = 1 << 26, 2.5
# A tokenizer.json: the maximum factor by which its normalizer lengthens a text, the characters that it may add to any
# text, and its number of steps.
GROWTH, ADDED_CHARACTERS, NORMALIZERS = 4096, 4096, 64
# Compressed data: bytes after decompression, and their ratio to the compressed bytes; only one of these limits may be
# exceeded. The third limit is for Parquet: bytes of the values that are read at once, if values may be repeated.
UNPACKED_BYTES, UNPACKED_RATIO, TOGETHER_BYTES = 256 << 20, 200, 1 << 28
# A GGUF file: number of keys and of tensors, number of texts in all lists together, bytes of a name, and axes of a
# tensor. The header has at most FILE_BYTES.
GGUF_ENTRIES, GGUF_STRINGS, GGUF_NAME_BYTES, GGUF_AXES = 1 << 16, 1 << 22, 1 << 16, 4
# sentencepiece tokens in a GGUF file: characters of one token, and of all tokens together (for Gemma 1.7 million).
PIECE_CHARACTERS, PIECES_CHARACTERS = 1024, 1 << 22
# Bytes of one text of a data set.
TEXT_BYTES = 1 << 30
