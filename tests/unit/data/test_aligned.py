"""With batch_invariant, every sequence in a row begins at a multiple of 128 tokens, and nothing else changes."""

import json
from pathlib import Path

import numpy as np
import pytest
from megatron_files import documents_of, write_indexed
from sample_data import opened, write_records
from stream_cases import WAYS, assert_aligned, assert_same, batches

from trainer.config.capabilities.invariant_keys import TILE
from trainer.config.errors import UserError
from trainer.data.dataset import Dataset

FIT = {"grain_packing_type": "first_fit"}
PACKINGS = [{}, FIT, {"grain_packing_type": "best_fit"}, FIT | {"use_truncation": True}, {"packing": False}]


@pytest.fixture
def open_texts(tmp_path: Path):
    """Returns a function that opens 40 documents of a prompt and a completion, 9 to 500 tokens, in rows of 256."""
    texts = [{"ask": f"What is {i}? ", "answer": str(i) * (3 + 137 * i % 240)} for i in range(40)]
    write_records(tmp_path / "a.jsonl", "jsonl", texts)
    files = f"{tmp_path}/a.jsonl"

    def open_again(**keys) -> Dataset:
        shared = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": files}
        shared |= {"tokenizer_type": "bytes", "train_data_columns": "[ask,answer]", "max_target_length": 2 * TILE}
        return opened(tmp_path / "cache", **shared | {"batch_invariant": True} | keys)

    return open_again


def pairs_of(batch: dict[str, np.ndarray]) -> list[list[int]]:
    """Returns the (input, target) pairs that bear loss, sorted."""
    learnt = batch["targets_segmentation"] != 0
    return sorted(np.stack([batch["inputs"][learnt], batch["targets"][learnt]], axis=1).tolist())


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_prepared_rows_hold_the_same_documents(open_texts, packing: dict):
    opened_both = [
        open_texts(**packing, eval_interval=1, held_out_share=0.3, batch_invariant=value) for value in (True, False)
    ]
    trained = [dataset.train_stream(rows=1)._source for dataset in opened_both]  # type: ignore[attr-defined]
    for sources in (trained, [dataset.evaluation for dataset in opened_both]):
        aligned, plain = (source.rows(np.arange(source.size)) for source in sources)
        assert_aligned(aligned)
        assert pairs_of(aligned) == pairs_of(plain)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("packing", PACKINGS[:3], ids=str)
def test_a_stream_resumes_behind_every_batch_on_every_process(open_texts, packing: dict, way: str):
    keys = packing | {"data_pipeline": way}
    dataset = open_texts(**keys)
    for share in ({}, {"process_index": 1, "process_count": 2}):
        whole = batches(dataset, 9, **share)
        for batch, _ in whole:
            assert_aligned(batch)
        for i in range(8):
            position = json.loads(json.dumps(whole[i][1]))
            assert_same(batches(open_texts(**keys), min(2, 8 - i), position, **share), whole[i + 1 : i + 3])
    with pytest.raises(UserError, match=r"the packing was .* False, align 128 and is .* False now"):
        open_texts(**keys, batch_invariant=False).train_stream(whole[0][1], rows=4)


@pytest.mark.parametrize("length", [TILE, 4 * TILE])
def test_synthetic_rows(tmp_path: Path, length: int):
    keys = {"dataset_type": "synthetic", "max_target_length": length}
    aligned, plain = (opened(tmp_path, **keys, batch_invariant=value) for value in (True, False))
    assert aligned.fingerprint != plain.fingerprint
    trained = [batch for batch, _ in batches(aligned, 9)]
    for batch in (*trained, aligned.evaluation.rows(np.arange(20))):
        assert_aligned(batch)
    segments = {number for batch in trained for number in batch["inputs_segmentation"].max(axis=1).tolist()}
    assert segments == ({1} if length == TILE else {1, 2, 3, 4})


def test_rows_of_mmap_files_are_one_sequence_each(tmp_path: Path):
    write_indexed(tmp_path / "a", [[document] for document in documents_of(60)])
    keys = {"dataset_type": "grain", "grain_file_type": "mmap", "grain_train_files": tmp_path / "a", "vocab_size": 200}
    keys |= {"max_target_length": TILE, "reset_attention_mask": False}
    aligned, plain = (batches(opened(tmp_path, **keys, batch_invariant=value), 3) for value in (True, False))
    assert_same(aligned, plain)
    for batch, _ in aligned:
        assert_aligned(batch)
