"""Limits for the contents of untrusted files. docs/guides/weights.md has a table of them.

They are far above the values in published files, and so low that a small file takes neither minutes nor all memory.
"""

# Bytes and nesting depth of JSON. For comparison: the index of a model with 100,000 tensors has 10 MB.
JSON_BYTES, JSON_DEPTH = 64 << 20, 64
# Bytes of any other file that is read at once. The largest tokenizer.json of a published model has 33 MB.
FILE_BYTES = 1 << 28
# Counts in config.json. PERIOD is low because layers that differ within a period are compiled one by one.
LAYERS, PERIOD, EXPERTS, MODULES = 4096, 64, 4096, 64
# quantization_config: the numbers of groups and of regular expressions, the number of characters of an expression, and
# the number of digits of a repetition count in it.
GROUPS, PATTERNS, PATTERN_CHARACTERS, REPETITION_DIGITS = 1024, 100, 200, 2
# Limits for rendering one conversation with a chat template. The number of characters of the template:
TEMPLATE_CHARACTERS = 1 << 17
# The size of a single text or list that the template makes, of all that it makes together, and of the rendered text:
MADE_CHARACTERS, MADE_TOGETHER, RENDERED_CHARACTERS = 1 << 26, 1 << 31, 1 << 26
# The number of digits of a width in a format, the number of bits of an integer, the size of an operand of **, and the
# digits argument of round:
FORMAT_DIGITS, INTEGER_BITS, OPERAND, ROUND_DIGITS = 3, 1 << 14, 1000, 100
# Loop iterations and calls together, and seconds of CPU time:
TURNS, SECONDS = 1 << 26, 2.5
# A tokenizer.json: the factor by which its normalizer may lengthen a text, the number of characters that the normalizer
# may add to any text, and the normalizer's number of steps.
GROWTH, ADDED_CHARACTERS, NORMALIZERS = 4096, 4096, 64
# Compressed data: the bytes after decompression, and the ratio of these bytes to the compressed bytes; data that exceed
# both limits are refused. The third limit is for Parquet files in which values may be repeated: the bytes of the values
# that are read at once.
UNPACKED_BYTES, UNPACKED_RATIO, TOGETHER_BYTES = 256 << 20, 200, 1 << 28
# A GGUF file: number of keys and of tensors, number of texts in all lists together, bytes of a name, and axes of a
# tensor. The header has at most FILE_BYTES.
GGUF_ENTRIES, GGUF_STRINGS, GGUF_NAME_BYTES, GGUF_AXES = 1 << 16, 1 << 22, 1 << 16, 4
# sentencepiece tokens in a GGUF file: characters of one token, and of all tokens together (for Gemma 1.7 million).
PIECE_CHARACTERS, PIECES_CHARACTERS = 1024, 1 << 22
# Bytes of one text of a data set.
TEXT_BYTES = 1 << 30
