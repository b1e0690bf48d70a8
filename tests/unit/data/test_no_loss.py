"""Data without a token that bears loss are refused with the counts."""

import json
from pathlib import Path

import numpy as np
import pytest
from sample_data import config_of, opened

from trainer.config.errors import UserError
from trainer.data.dataset import open_dataset
from trainer.training.evaluate import check_held_out

WAYS = ("prepared", "streaming")
COLUMNS = {"train_data_columns": "[prompt,completion]", "eval_data_columns": "[prompt,completion]"}
CUT = {"use_truncation": True, "packing": False, "max_target_length": 16}
LONG, SHORT = {"prompt": "p" * 40, "completion": "c"}, {"prompt": "p", "completion": "cc"}


def keys_of(path: Path, *rows: dict, **keys) -> dict:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": path, "held_out_share": 0}
    return files | COLUMNS | {"tokenizer_type": "bytes"} | keys


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("rows", "keys", "counts"),
    [
        (
            [LONG] * 3,
            CUT,
            "0 of 48 tokens contribute to the loss, in 3 documents, 3 of them cut off by use_truncation=true,",
        ),
        (
            [{"prompt": "abc", "completion": ""}] * 5,
            {"add_eos": False},
            "0 of 15 tokens contribute to the loss, in 5 documents, so",
        ),
        (
            [{"prompt": "abc", "completion": None}],
            {"add_eos": False},
            "0 of 3 tokens contribute to the loss, in 1 documents, so",
        ),
    ],
    ids=["prompts fill the rows", "completions are empty", "completions are null"],
)
def test_training_documents_without_loss_are_refused(tmp_path: Path, rows: list, keys: dict, counts: str, way: str):
    keys = keys_of(tmp_path / "a.jsonl", *rows, **keys, data_pipeline=way)
    longer = r"\(longest 43\); give max_target_length=128, " if "cut off" in counts else "; "
    with pytest.raises(UserError, match=rf"a.jsonl: {counts}.*{longer}fill the column, or set use_truncation=false or"):
        opened(tmp_path / "cache", **keys)
    assert not list((tmp_path / "cache").glob("train-*[!k]"))
    # All tokens contribute to the loss.
    opened(tmp_path / "cache", **keys, sft_train_on_completion_only=False)


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_documents_without_loss_are_refused(tmp_path: Path, way: str):
    keys = keys_of(tmp_path / "a.jsonl", SHORT, **CUT, data_pipeline=way, eval_interval=1)
    (tmp_path / "b.jsonl").write_text(json.dumps(LONG) + "\n")
    with pytest.raises(UserError, match=r"b.jsonl: 0 of 16 tokens contribute to the loss, in 1 documents"):
        opened(tmp_path / "cache", **keys, grain_eval_files=tmp_path / "b.jsonl")


@pytest.mark.parametrize("way", WAYS)
def test_documents_that_lose_all_their_loss_are_counted(tmp_path: Path, way: str):
    keys = keys_of(tmp_path / "a.jsonl", LONG, SHORT, LONG, **CUT, data_pipeline=way, enable_data_shuffling=False)
    lines: list[str] = []
    stream = open_dataset(config_of(tmp_path / "cache", **keys), lines.append).train_stream(rows=3)
    batch, _ = next(stream)
    stream.close()
    assert sorted(np.count_nonzero(batch["targets_segmentation"], axis=1).tolist()) == [0, 0, 3]
    (note, *_) = (line for line in lines if "documents have no token that contributes to the loss" in line)
    assert ("2 of 3 " in note) == (way == "prepared")  # streaming repeats the data forever


def test_the_first_evaluation_batches_must_bear_loss(tmp_path: Path):
    keys = keys_of(tmp_path / "a.jsonl", *[LONG] * 5, SHORT, **CUT, eval_interval=1)
    held_out = opened(tmp_path / "cache", **keys, grain_eval_files=tmp_path / "a.jsonl").evaluation
    for eval_steps in (3, -1):
        check_held_out(held_out, 2, eval_steps)
    with pytest.raises(
        UserError, match=r"eval_steps=2: 0 of 64 tokens contribute to the loss in the first 2 .* of 2 rows"
    ):
        check_held_out(held_out, 2, 2)
    check_held_out(None, 2, 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_share_held_out_that_leaves_nothing_is_named(tmp_path: Path, way: str):
    keys = keys_of(tmp_path / "a.jsonl", *({"prompt": str(i), "completion": "c"} for i in range(3)), data_pipeline=way)
    with pytest.raises(
        UserError, match=r"a.jsonl without 0.99.*there is no document with text; .*smaller held_out_share"
    ):
        opened(tmp_path / "cache", **keys | {"held_out_share": 0.99, "eval_interval": 1})
    with pytest.raises(UserError, match=r"a.jsonl, 0.001 held out.*there is no document.*set a larger held_out_share"):
        opened(tmp_path / "cache", **keys | {"held_out_share": 0.001, "eval_interval": 1})
