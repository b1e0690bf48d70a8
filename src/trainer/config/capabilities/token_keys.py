"""Checks of the keys for Megatron-LM's files of token ids: grain_file_type=mmap and mmap_npy."""

import re

from trainer.config.capabilities.invariant_keys import TILE
from trainer.config.errors import shortened
from trainer.config.key_rows import Check, Inert, Row, refused
from trainer.config.keys import Config

_RATIO = r"\s*[0-9]{0,9}\.?[0-9]{1,9}\s*"
_KEYS = "mmap_eod_id reset_attention_mask eod_mask_loss packing_max_segments_per_sample mmap_npy_split"
_OF_TEXT = (
    "train_data_columns eval_data_columns tokenize_train_data tokenize_eval_data add_bos add_eos grain_packing_type "
    "max_segments_per_seq use_truncation sft_train_on_completion_only"
)


def token_files(config: Config) -> bool:
    """Returns whether the data files contain token ids instead of text."""
    return config.dataset_type == "grain" and config.grain_file_type in ("mmap", "mmap_npy")


def split_ratios(config: Config) -> list[float]:
    """Returns the ratios in mmap_npy_split (training, evaluation, others); [] if the key is empty or has no effect."""
    text = config.mmap_npy_split if token_files(config) and config.grain_file_type == "mmap_npy" else ""
    return [float(ratio) for ratio in text.split(",")] if text else []


def shortest_segment(config: Config) -> int:
    """Returns n: a segment that has at most n tokens at the end of a document continues with the next document.

    A longer segment ends together with the document. The key packing_max_segments_per_sample determines n. If n is 0,
    every segment ends together with its document.
    """
    most, reset = config.packing_max_segments_per_sample, config.reset_attention_mask
    shortest = config.max_target_length // most if most > 0 and reset else 0
    return shortest * (shortest > 1)  # MaxText, too, ignores a threshold of 1


def most_segments(config: Config) -> int | None:
    """Returns the maximum number of segments in a row; None if the keys do not bound it."""
    # All segments but the last have more than `shortest` tokens.
    shortest = shortest_segment(config)
    return (config.max_target_length - 1) // (shortest + 1) + 1 if shortest else None


def _split(config: Config) -> str | None:
    text = config.mmap_npy_split
    if not text or (re.fullmatch(f"{_RATIO}(,{_RATIO}){{1,9}}", text) and all(map(float, text.split(",")[:2]))):
        return None
    return f"{shortened(text)!r} is not a list of ratios, the first two above 0, such as 99,1"


ROWS = (
    Row(("mmap_eod_id", "reset_attention_mask", "eod_mask_loss", "packing_max_segments_per_sample"), step=False),
    Row(("mmap_npy_split",), step=False),
)
CHECKS: tuple[Check, ...] = (
    (("mmap_npy_split",), _split),
    refused(
        ("grain_file_type", "packing"),
        lambda c: token_files(c) and not c.packing,
        "the documents of mmap files are one stream of tokens, which is cut into rows; set packing=true",
    ),
    refused(
        ("grain_file_type", "data_pipeline"),
        lambda c: token_files(c) and c.data_pipeline != "prepared",
        "rows are read from the memory-mapped files, so streaming is not needed; set data_pipeline=prepared",
    ),
    refused(
        ("batch_invariant", "grain_file_type", "reset_attention_mask"),
        lambda c: c.batch_invariant and token_files(c) and c.reset_attention_mask,
        f"sequences must begin at multiples of {TILE} tokens, but in rows of mmap files they begin where a document "
        "ends; set reset_attention_mask=false, so that a row is one sequence",
    ),
)
INERT = (
    Inert(_KEYS.split(), lambda c: not token_files(c), "grain_file_type is neither mmap nor mmap_npy"),
    Inert(_OF_TEXT.split(), token_files, "mmap files contain token ids, which are cut into rows unchanged"),
    Inert(("mmap_npy_split",), lambda c: c.grain_file_type != "mmap_npy", "grain_file_type is not mmap_npy"),
    Inert(
        ("mmap_eod_id",),
        lambda c: not c.reset_attention_mask and not c.eod_mask_loss,
        "reset_attention_mask=false and eod_mask_loss=false",
    ),
    Inert(("packing_max_segments_per_sample",), lambda c: not c.reset_attention_mask, "reset_attention_mask=false"),
    Inert(("held_out_share",), lambda c: bool(split_ratios(c)), "mmap_npy_split divides the documents"),
    Inert(
        ("tokenizer_type",),
        lambda c: token_files(c) and not c.tokenizer_path and c.tokenizer_type != "bytes",
        "mmap files contain token ids, and without a tokenizer_path there is no sample",
    ),
)
