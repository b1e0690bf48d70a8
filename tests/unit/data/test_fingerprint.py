"""The fingerprint of data: settings that change rows change it, and the location of files does not."""

import re
from pathlib import Path

import numpy as np
import pytest
from sample_data import VOCAB, document, opened, write_records
from stream_cases import WAYS, batches

import trainer.config

BYTES = {"tokenizer_type": "bytes"}


FIT = BYTES | {"grain_packing_type": "first_fit"}


COLUMNS = BYTES | {"train_data_columns": "[text,more]"}


IDS = {"tokenize_train_data": False, "train_data_columns": "ids"}


# A key, a value that is not the default, and other settings with which the value changes the rows or their order.
CHANGES = [
    ("add_bos", False, BYTES),
    ("add_eos", False, BYTES),
    ("batch_invariant", True, BYTES | {"max_target_length": 256}),
    ("data_pipeline", "prepared", BYTES),
    ("data_shuffle_seed", 1, BYTES),
    ("document_filter", "filters_of_tests:shout", BYTES),
    ("document_max_length", 60, BYTES),
    ("document_min_length", 60, BYTES),
    ("document_normalization", "NFKC", BYTES),
    ("drop_duplicates", True, BYTES),
    ("enable_data_shuffling", False, BYTES),
    ("grain_packing_type", "best_fit", BYTES),
    ("grain_shuffle_buffer_size", 3, BYTES),
    ("held_out_share", 0.4, BYTES),
    ("max_segments_per_seq", 1, FIT),
    ("max_target_length", 16, BYTES),
    ("packing", False, BYTES),
    ("prepare_part_mib", 0.002, BYTES),
    ("reuse_example_batch", 1, BYTES),
    ("sft_train_on_completion_only", False, COLUMNS),
    ("tokenize_train_data", False, IDS | BYTES | {"tokenize_train_data": True, "train_data_columns": "text"}),
    ("tokenizer_type", "bytes", {}),
    ("train_data_columns", "more", BYTES),
    ("use_truncation", True, FIT),
    ("vocab_size", VOCAB + 1, {}),
    ("vocab_size", VOCAB + 1, IDS),
]


# Other data keys: where documents come from (covered by the files' own fingerprint), how many workers read them
# (covered by a position), how to evaluate, where to store things, how many passes are made, and how many rows a step
# takes (which may change on resume). The keys of token files are changed in test_megatron.py, the keys of conversations
# in chat/test_encoder.py, and the keys of pairs in test_pairs.py.
ELSEWHERE = re.compile(
    r"dataset_|eval_|grain_(train|eval)_|grain_file_type|grain_worker_count|hf_|train_split|data_cache_directory|remote_|"
    r"tokenizer_path|tokenize_eval_data|prepared_path|prepare_workers|per_device_batch_size|num_epoch|"
    r"use_sft|use_dpo|dpo_|chat_template|formatting_func_|"
    r"mmap_|reset_attention_mask|eod_mask_loss|packing_max_segments_per_sample"
)


def test_every_key_that_changes_rows_is_among_the_changes():
    base = Path(trainer.config.__file__).parents[3] / "base.yml"
    section = base.read_text().split("# ---- Data --")[1].split("# ---- ")[0]
    keys = re.findall(r"^(\w+):", section, re.MULTILINE)
    assert len(keys) > 25
    changed = {key for key, _, _ in CHANGES}
    assert {key for key in keys if not ELSEWHERE.match(key)} <= changed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("key", "value", "others"), CHANGES, ids=[key for key, _, _ in CHANGES])
def test_a_key_that_changes_the_rows_changes_the_fingerprint(tmp_path: Path, key, value, others: dict, way: str):
    rows = [{"text": document(i) + "\ufb01", "more": document(i + 1), "ids": [i, 2 * i, 3]} for i in range(20)]
    rows.append(rows[7])
    write_records(tmp_path / "a.jsonl", "jsonl", rows)
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": tmp_path / "a.jsonl"}
    keys |= {"data_pipeline": way, "tokenize_eval_data": "tokenize_train_data" not in others} | others
    if (way, key) == ("streaming", "drop_duplicates"):
        value = False  # true is refused
    if key == "data_pipeline":
        value = WAYS[way == WAYS[0]]
    changed = keys | {key: value}
    if key == "tokenize_train_data":
        changed |= {"train_data_columns": "ids"}
    first, second = opened(tmp_path / "cache", **keys), opened(tmp_path / "cache", **changed)
    without_effect = {"prepared": ["grain_shuffle_buffer_size"], "streaming": ["prepare_part_mib", "drop_duplicates"]}
    unchanged = key in without_effect[way]
    assert (first.fingerprint == second.fingerprint) == unchanged
    left, right = ([batch for batch, _ in batches(dataset, 12)] for dataset in (first, second))
    same = all(np.array_equal(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in a)
    assert same == (unchanged or (key == "vocab_size" and others == IDS))


def test_a_copy_of_the_files_elsewhere_is_the_same_data(corpora, tmp_path: Path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in corpora("jsonl").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl"}
    first, second = (
        opened(tmp_path / "cache", **keys, grain_train_files=f"{folder}/*") for folder in (corpora("jsonl"), copy)
    )
    assert first.fingerprint == second.fingerprint
    assert len(list((tmp_path / "cache").glob("train-*[!k]"))) == 1
