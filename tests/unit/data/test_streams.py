"""Training batches of both pipelines: exact resume after every batch, the same rows for every caller, refusals."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from sample_data import config_of, document, opened, write_corpus, write_records, write_tfds
from stream_cases import ROWS, WAYS, assert_aligned, assert_same, batches

from trainer.config.errors import UserError
from trainer.data.batches import train_batch
from trainer.data.dataset import Dataset, open_dataset
from trainer.data.loader import Loader
from trainer.data.order import VERSION

KINDS = ("arrayrecord", "jsonl", "parquet", "text", "tfrecord")


def assert_resumes(open_again, count: int = 8) -> None:
    """Checks that a stream opened at the position after any batch continues exactly like the undisturbed stream."""
    whole = batches(open_again(), count)
    dataset = open_again()
    for i, (_, position) in enumerate(whole[:-1]):
        stored = json.loads(json.dumps(position))
        behind = min(count, i + 4) if i else count
        assert_same(batches(dataset, behind - i - 1, stored), whole[i + 1 : behind])
    assert len({batch["inputs"].tobytes() for batch, _ in whole}) > 1


SETTINGS = [
    {},
    {"enable_data_shuffling": False},
    {"grain_packing_type": "first_fit"},
    {"grain_packing_type": "best_fit", "max_segments_per_seq": 2},
    {"packing": False},
    {"use_truncation": True, "grain_packing_type": "first_fit"},
    {"grain_shuffle_buffer_size": 5, "data_shuffle_seed": 3},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_resumes_behind_every_batch_over_epochs(corpora, tmp_path: Path, kind: str, way: str):
    keys = {"dataset_type": "grain", "grain_file_type": kind, "grain_train_files": f"{corpora(kind)}/*"}
    # A byte is a token, so the 30 documents are about 60 rows. 8 batches stay within the first epoch, 40 do not.
    keys |= {"tokenizer_type": "bytes", "data_pipeline": way}
    assert_resumes(lambda: opened(tmp_path, **keys))
    dataset = opened(tmp_path, **keys)
    whole = batches(dataset, 40)
    assert_same(batches(dataset, 10, whole[29][1]), whole[30:])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s) or "defaults")
def test_every_packing_and_order_resumes(corpora, tmp_path: Path, settings: dict, way: str):
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{corpora('jsonl')}/*"}
    assert_resumes(lambda: opened(tmp_path, **keys, data_pipeline=way, tokenizer_type="bytes", **settings))


@pytest.mark.parametrize("way", WAYS)
def test_mixtures_resume_and_keep_their_shares(tmp_path: Path, way: str):
    for name, mark in (("a", "A"), ("b", "B")):
        folder = tmp_path / name
        folder.mkdir()
        lines = [json.dumps({"text": mark * (5 + i % 20)}) for i in range(40)]
        (folder / "x.jsonl").write_text("\n".join(lines))
    files = f"{tmp_path}/a/*.jsonl,0.75;{tmp_path}/b/*.jsonl,0.25"
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": files, "data_pipeline": way}

    def dataset() -> Dataset:
        return opened(tmp_path / "cache", **keys, tokenizer_type="bytes")

    assert_resumes(dataset)
    rows = np.concatenate([batch["inputs"] for batch, _ in batches(dataset(), 100)])
    share = (rows == ord("A")).any(axis=1)
    assert not (share & (rows == ord("B")).any(axis=1)).any()
    assert abs(share.mean() - 0.75) < 0.01


@pytest.mark.parametrize("way", WAYS)
def test_tfds_resumes(tmp_path: Path, way: str, capsys):
    write_tfds(tmp_path / "data")
    keys = {"dataset_type": "tfds", "dataset_path": tmp_path / "data", "dataset_name": "tiny/made:1.2.3"}
    assert_resumes(lambda: opened(tmp_path, **keys, data_pipeline=way))


@pytest.mark.parametrize("way", WAYS)
def test_hf_resumes(tmp_path: Path, way: str):
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list([{"text": document(i)} for i in range(30)]).save_to_disk(tmp_path / "hf")
    keys = {"dataset_type": "hf", "hf_path": tmp_path / "hf", "data_pipeline": way}
    assert_resumes(lambda: opened(tmp_path, **keys))


def test_synthetic_and_stdlib_resume(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.data.stdlib.stdlib_folder", lambda: root)
    assert_resumes(lambda: opened(tmp_path, dataset_type="synthetic"))
    assert_resumes(lambda: opened(tmp_path, dataset_type="stdlib"))


def test_workers_stream_and_resume(corpora, tmp_path: Path):
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{corpora('jsonl')}/*"}
    keys |= {"data_pipeline": "streaming", "tokenizer_type": "bytes"}
    keys |= {"batch_invariant": True, "max_target_length": 256}
    dataset = opened(tmp_path, **keys, grain_worker_count=2)
    whole = batches(dataset, 8)
    for batch, _ in whole:
        assert_aligned(batch)
    assert_same(batches(dataset, 4, json.loads(json.dumps(whole[3][1]))), whole[4:])
    with pytest.raises(UserError, match=r"grain_worker_count=2, but now the value is 0"):
        opened(tmp_path, **keys).train_stream(whole[3][1], rows=ROWS)


@pytest.mark.parametrize(
    ("kind", "processes", "count", "documents"),
    [("arrayrecord", 2, 7, 28), ("arrayrecord", 4, 7, 28), ("jsonl", 2, 10, 30), ("jsonl", 4, 9, 30)],
)
def test_processes_stream_different_documents(
    corpora, tmp_path: Path, kind: str, processes: int, count: int, documents: int
):
    """Two processes share the three JSONL files; four processes share the records of all files."""
    keys = {"dataset_type": "grain", "grain_file_type": kind, "grain_train_files": f"{corpora(kind)}/*"}
    keys |= {"data_pipeline": "streaming", "tokenizer_type": "bytes", "enable_data_shuffling": False, "packing": False}
    dataset = opened(tmp_path, **keys, max_target_length=256)
    seen = []
    for i in range(processes):
        parts = batches(dataset, count, process_index=i, process_count=processes)
        assert all(len(batch["inputs"]) == ROWS // processes for batch, _ in parts)
        assert [batch["row"][0] for batch, _ in parts] == [i * ROWS // processes] * len(parts)
        seen.append({row.tobytes() for batch, _ in parts for row in batch["inputs"]})
        with pytest.raises(UserError, match=rf"process_count={processes}, but now the value is 1"):
            dataset.train_stream(parts[0][1], rows=ROWS)
    assert not set.intersection(*seen)
    assert len(set.union(*seen)) == documents


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_prepared_positions_resume_on_any_number_of_processes(corpora, tmp_path: Path, processes: int):
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{corpora('jsonl')}/*"}
    dataset = opened(tmp_path, **keys)
    whole = batches(dataset, 8)
    parts = [batches(dataset, 4, whole[3][1], process_index=i, process_count=processes) for i in range(processes)]
    for same, (batch, position) in zip(zip(*parts, strict=True), whole[4:], strict=True):
        for name in batch:
            np.testing.assert_array_equal(np.concatenate([part[name] for part, _ in same]), batch[name])
        assert all(part_position == position for _, part_position in same)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"grain_train_files": "other"}, "the training documents was"),
        ({"tokenizer_type": "auto"}, "the tokenizer was"),
        ({"max_target_length": 16}, "max_target_length was 32 and is 16"),
        ({"packing": False}, "the packing was"),
        ({"data_shuffle_seed": 1}, "the shuffling was seed 0"),
        ({"data_pipeline": "streaming"}, "data_pipeline was prepared and is streaming"),
        ({"held_out_share": 0.3}, "the training documents was"),
    ],
)
def test_a_position_of_other_data_is_refused(corpora, tmp_path: Path, change: dict, named: str):
    files = f"{corpora('jsonl')}/*"
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": files, "tokenizer_type": "bytes"}
    dataset = opened(tmp_path, **keys)
    ((_, position),) = batches(dataset, 1)
    if change.get("grain_train_files"):
        change = {"grain_train_files": f"{write_corpus(tmp_path / 'other', 'jsonl', 20)}/*"}
    other = opened(tmp_path, **keys | change)
    assert other.fingerprint != dataset.fingerprint
    with pytest.raises(UserError, match=named):
        other.train_stream(position, rows=ROWS)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_position_in_an_older_order_is_refused_by_name(corpora, tmp_path: Path, way: str, shuffle: bool):
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{corpora('jsonl')}/*"}
    keys |= {"data_pipeline": way, "tokenizer_type": "bytes", "enable_data_shuffling": shuffle}
    dataset = opened(tmp_path, **keys)
    whole = batches(dataset, 2)
    position = json.loads(json.dumps(whole[0][1]))
    position["identity"]["order"] = position["identity"]["order"].removesuffix(f", version {VERSION}")
    if shuffle:
        with pytest.raises(UserError, match=rf"the shuffling was (.*) and is \1, version {VERSION} now; .* new run"):
            dataset.train_stream(position, rows=ROWS)
    else:
        assert_same(batches(dataset, 1, position), whole[1:])


@pytest.mark.parametrize("way", WAYS)
def test_each_epoch_has_every_document_in_an_order_of_its_own(corpora, tmp_path: Path, way: str):
    for kind in ("jsonl", "arrayrecord"):
        keys = {"dataset_type": "grain", "grain_file_type": kind, "grain_train_files": f"{corpora(kind)}/*"}
        keys |= {"tokenizer_type": "bytes", "packing": False, "max_target_length": 256, "data_pipeline": way}
        rows = [row.tobytes() for batch, _ in batches(opened(tmp_path, **keys), 15) for row in batch["inputs"]]
        epochs = rows[:30], rows[30:]
        assert epochs[0] != epochs[1]
        assert [len(set(epoch)) for epoch in epochs] == [30, 30]


def test_the_loader_hands_on_the_position_of_the_batch_consumed(corpora, tmp_path: Path):
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{corpora('jsonl')}/*"}
    dataset = opened(tmp_path, **keys, data_pipeline="streaming")
    whole = batches(dataset, 6)
    with Loader(dataset.train_stream(rows=ROWS), 6) as loader:
        assert_same(list(itertools.islice(loader, 2)), whole[:2])  # two more are loaded ahead
    with Loader(dataset.train_stream(whole[1][1], rows=ROWS), 4) as loader:
        assert_same(list(loader), whole[2:])


def test_no_record_for_a_process_is_an_error(tmp_path: Path):
    (tmp_path / "one.jsonl").write_text('{"text": "only one"}\n')
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{tmp_path}/one.jsonl"}
    dataset = opened(tmp_path / "cache", **keys, data_pipeline="streaming", tokenizer_type="bytes")
    with pytest.raises(UserError, match=r"too few records for every process"):
        batches(dataset, 1, process_index=1, process_count=2)


@pytest.mark.parametrize("kind", ["jsonl", "arrayrecord"])
def test_a_share_without_text_is_an_error(tmp_path: Path, kind: str):
    """One of two processes gets every second record, and all of these are empty."""
    write_records(tmp_path / f"a.{kind}", kind, [{"text": document(i) if i % 2 else ""} for i in range(40)])
    keys = {"dataset_type": "grain", "grain_file_type": kind, "grain_train_files": tmp_path / f"a.{kind}"}
    keys |= {"held_out_share": 0, "eval_interval": -1, "enable_data_shuffling": False, "tokenizer_type": "bytes"}
    dataset = opened(tmp_path / "cache", **keys, data_pipeline="streaming")
    with pytest.raises(UserError, match=r"share has no document with text: \d+ records in succession are empty"):
        batches(dataset, 1, process_index=0, process_count=2)
    assert len(batches(dataset, 40, process_index=1, process_count=2)) == 40


@pytest.mark.rest(covered_by="the smaller share", cases=("40",))
@pytest.mark.parametrize(("count", "with_text", "shuffle"), [(40, 3, True), (9, 1, False)])
def test_a_share_that_changes_is_searched_until_it_has_text(tmp_path: Path, count: int, with_text: int, shuffle: bool):
    """If shuffled, shares differ between epochs. In order, they differ if the number of processes does not divide the
    number of records."""
    records = [{"text": document(i) if i < with_text else ""} for i in range(count)]
    write_records(tmp_path / "a.arrayrecord", "arrayrecord", records)
    keys = {"dataset_type": "grain", "grain_file_type": "arrayrecord", "grain_train_files": tmp_path / "a.arrayrecord"}
    keys |= {"held_out_share": 0, "eval_interval": -1, "enable_data_shuffling": shuffle, "tokenizer_type": "bytes"}
    dataset = opened(tmp_path / "cache", **keys, data_pipeline="streaming")
    for process in range(8):
        stream = dataset.train_stream(rows=8, process_index=process, process_count=8)
        for _ in range(60):
            next(stream)
        stream.close()


def test_streaming_says_what_it_cuts_and_skips(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 100}) + "\n" + json.dumps({"text": ""}) + "\n")
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{tmp_path}/a.jsonl"}
    keys |= {"use_truncation": True, "grain_packing_type": "first_fit", "data_pipeline": "streaming"}
    lines: list[str] = []
    dataset = open_dataset(config_of(tmp_path, **keys, tokenizer_type="bytes"), lines.append)
    batches(dataset, 1)
    assert any("too long and lose" in line for line in lines), lines


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_line_deep_in_a_file_is_named_by_the_loader(tmp_path: Path, way: str):
    (tmp_path / "a.jsonl").write_text('{"text": "some good text"}\n' * 50 + "bad\n")
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{tmp_path}/a.jsonl"}
    with pytest.raises(UserError, match=r"a.jsonl, line 51, is not JSON"):  # noqa: PT012 - either may find it
        dataset = opened(tmp_path / "cache", **keys, tokenizer_type="bytes", data_pipeline=way)
        with Loader(dataset.train_stream(rows=ROWS), 50) as loader:
            list(loader)


@pytest.mark.parametrize(
    "keys",
    [
        {"dataset_type": "synthetic"},
        {"dataset_type": "grain", "data_pipeline": "prepared"},
        {"dataset_type": "grain", "data_pipeline": "streaming"},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_the_first_batch_is_repeated_and_so_it_is_on_resume(corpora, tmp_path: Path, keys: dict):
    if keys["dataset_type"] == "grain":
        keys = keys | {"grain_file_type": "jsonl", "grain_train_files": f"{corpora('jsonl')}/*"}
        keys |= {"tokenizer_type": "bytes"}
    plain = opened(tmp_path, **keys)
    reusing = opened(tmp_path, **keys, reuse_example_batch=1)
    (first, behind), (second, _) = batches(plain, 2)
    repeated = batches(reusing, 3)
    for batch, position in repeated:
        assert batch["inputs"].tobytes() == first["inputs"].tobytes() != second["inputs"].tobytes()
        assert position != behind
    # The position does not change, not even as JSON.
    assert_same(batches(reusing, 3, json.loads(json.dumps(repeated[2][1]))), repeated)
    assert reusing.fingerprint != plain.fingerprint
    assert "first batch only" in str(reusing)
    with pytest.raises(UserError, match="belongs to other data"):
        plain.train_stream(repeated[0][1], rows=ROWS)


def test_a_repeated_batch_is_made_once(tmp_path: Path, monkeypatch):
    made = []

    def counted(*args, **kwargs):
        made.append(args)
        return train_batch(*args, **kwargs)

    monkeypatch.setattr("trainer.data.streams.train_batch", counted)
    with Loader(opened(tmp_path, dataset_type="synthetic", reuse_example_batch=1).train_stream(rows=ROWS), 6) as loader:
        assert len(list(loader)) == 6
    assert len(made) == 1
