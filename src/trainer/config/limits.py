"""Limits of what files may hold that come from someone else. docs/guides/weights.md has the table of them.

They are far above what published files have, and low enough that a small file takes neither minutes nor all memory.
"""

# JSON. For comparison: the index of a model of 100,000 tensors has 10 MB.
JSON_BYTES, JSON_DEPTH = 64 << 20, 64
# Any other file that is read whole. The largest tokenizer.json of a published model has 33 MB.
FILE_BYTES = 1 << 28
# Counts in config.json. Layers that differ within a period are compiled one by one.
LAYERS, PERIOD, EXPERTS, MODULES = 4096, 64, 4096, 64
# quantization_config: groups, regular expressions, their characters, and digits of a number of repetitions in them.
GROUPS, PATTERNS, PATTERN_CHARACTERS, REPETITION_DIGITS = 1024, 100, 200, 2
