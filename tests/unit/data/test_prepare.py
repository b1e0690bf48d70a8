"""Prepared data: their content, and when they are prepared again. For failures see test_prepare_failures.py."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sample_data import LENGTH, VOCAB, config_of, opened, write_corpus, write_tfds

from trainer.config.errors import UserError
from trainer.data import cache, rows
from trainer.data.batches import eval_batches
from trainer.data.dataset import Dataset, open_dataset
from trainer.data.documents import Location
from trainer.data.packing import Origin, Packed, Resume
from trainer.data.stdlib import read_files
from trainer.data.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def prepared(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A dataset that was opened a second time, so that it comes from the cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.data.stdlib.stdlib_folder", lambda: root)
        opened(folder, dataset_type="stdlib", eval_interval=1)
        config = config_of(folder, dataset_type="stdlib", eval_interval=1)
        return open_dataset(config, lambda line: pytest.fail(f"prepared twice: {line}"))


def train_rows(dataset: Dataset):
    """Returns the source of rows of a prepared dataset's stream."""
    return dataset.train_stream(rows=1)._source  # type: ignore[attr-defined]


def documents_of(source, tokenizer) -> list[bytes]:
    """Returns the bytes of each document in the targets of a split, in order. Checks that no input crosses a document
    boundary."""
    batch = source.rows(np.arange(source.size))
    real = batch["targets_segmentation"] != 0
    inputs, targets, place = batch["inputs"][real], batch["targets"][real], batch["inputs_position"][real]
    # A target that does not end a document is also the next input.
    inside = targets[:-1] != tokenizer.eos
    assert (targets[:-1][inside] == inputs[1:][inside]).all()
    assert (inputs[1:][~inside] == tokenizer.bos).all()
    assert inputs[0] == tokenizer.bos
    assert (place[1:][~inside] == 0).all()
    assert (place == 0).sum() > len(place) // LENGTH
    ends = np.flatnonzero(targets == tokenizer.eos)
    assert ends[-1] == len(targets) - 1
    return [tokenizer.decode(part).encode() for part in np.split(targets, ends[:-1] + 1)]


def test_rows_spell_every_file_once_in_order(prepared: Dataset, root: Path):
    files = read_files(root)
    for source, held_out in ((train_rows(prepared), False), (prepared.evaluation, True)):
        expected = [(root / file.path).read_bytes() for file in files if file.held_out == held_out]
        assert documents_of(source, prepared.tokenizer) == expected


def test_targets_stand_for_all_bytes(prepared: Dataset, root: Path):
    size = sum(file.size for file in read_files(root) if file.held_out)
    batches = list(eval_batches(prepared.evaluation, 7))
    targets = np.concatenate([b["targets"][b["targets_segmentation"] != 0] for b in batches])
    assert prepared.tokenizer.bytes_per_token[targets].sum() == size


def test_rows_come_as_they_were_asked_for(prepared: Dataset):
    source = train_rows(prepared)
    everything = source.rows(np.arange(source.size))
    some = source.rows(np.array([5, 0, 5]))
    for name, values in some.items():
        assert values.dtype == np.int32
        np.testing.assert_array_equal(values, everything[name][[5, 0, 5]])


def folders(cache_folder: Path) -> set[str]:
    return {path.name for path in cache_folder.iterdir() if path.is_dir()}


def test_only_what_changed_is_prepared_anew(tmp_path: Path):
    write_corpus(tmp_path / "files", "jsonl")
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{tmp_path}/files/*"}
    keys |= {"eval_interval": 1, "grain_eval_files": f"{tmp_path}/files/0.*"}
    folder, seen = tmp_path / "cache", set()
    for change, new in (
        ({}, {"bpe", "train", "held-out"}),
        ({"data_shuffle_seed": 1, "eval_steps": 3, "per_device_batch_size": 2}, set()),
        ({"max_target_length": 16}, {"train", "held-out"}),
        ({"vocab_size": VOCAB + 1}, {"bpe", "train", "held-out"}),
        ({"add_eos": False}, {"train", "held-out"}),
        ({"grain_packing_type": "first_fit"}, {"train", "held-out"}),
        ({"grain_eval_files": f"{tmp_path}/files/1.*"}, {"held-out"}),
        ({"eval_interval": -1}, set()),
        ({"data_pipeline": "streaming"}, set()),
    ):
        opened(folder, **keys | change)
        names = folders(folder)
        assert {name.rsplit("-", 2)[0] for name in names - seen} == new, change
        seen = names
    with (tmp_path / "files" / "2.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    opened(folder, **keys)
    # The tokenizer is trained again with the same result, so the held-out rows are still valid.
    assert {name.rsplit("-", 2)[0] for name in folders(folder) - seen} == {"bpe", "train"}


def test_a_mixture_shares_what_its_parts_have_prepared(tmp_path: Path):
    write_corpus(tmp_path / "files", "jsonl")
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "tokenizer_type": "bytes"}
    opened(tmp_path / "cache", **keys, grain_train_files=f"{tmp_path}/files/0.*")
    opened(tmp_path / "cache", **keys, grain_train_files=f"{tmp_path}/files/0.*,0.3;{tmp_path}/files/1.*,0.7")
    assert len(folders(tmp_path / "cache")) == 2


@pytest.mark.parametrize(("vocab_size", "size"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_ids_are_stored_in_the_narrowest_type(tmp_path: Path, vocab_size: int, size: int):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": [vocab_size - 1] * 1000}) + "\n")
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{tmp_path}/a.jsonl"}
    keys |= {
        "tokenize_train_data": False,
        "tokenize_eval_data": False,
        "vocab_size": vocab_size,
        "max_target_length": 999,
    }
    dataset = opened(tmp_path / "cache", **keys)
    batch, _ = next(dataset.train_stream(rows=1))
    assert (batch["inputs"] == vocab_size - 1).all()
    for file in tmp_path.rglob("rows.npy"):
        assert np.load(file, mmap_mode="r").dtype.itemsize == size


def test_every_segment_of_a_long_row_keeps_its_number(tmp_path: Path):
    length = 1 << 16
    names = ("inputs", "targets", "segmentation", "loss")
    row = dict.fromkeys(names, np.ones(length, np.int32)) | {"segmentation": np.arange(1, length + 1)}
    packed = Packed(row, Resume(None, 0, 0), [Origin(Location("a"), 0)])
    rows.write(tmp_path, [packed], length=length, vocab_size=300, masked=False)
    batch = rows.StoredRows([(tmp_path, 1)]).rows(np.array([0]))
    np.testing.assert_array_equal(batch["inputs_segmentation"], row["segmentation"][None])


def test_completions_bear_the_loss_in_prepared_rows(tmp_path: Path):
    lines = [json.dumps({"prompt": "ask", "completion": "say" * (1 + i % 3)}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{tmp_path}/a.jsonl"}
    keys |= {"train_data_columns": "[prompt,completion]", "eval_data_columns": "[prompt,completion]"}
    for way in ("prepared", "streaming"):
        dataset = opened(tmp_path / "cache", **keys, tokenizer_type="bytes", data_pipeline=way)
        stream = dataset.train_stream(rows=4)
        batch, _ = next(stream)
        stream.close()
        borne = batch["targets"][batch["targets_segmentation"] != 0].tolist()
        assert set(borne) == {*map(ord, "say"), 256}
        assert {*map(ord, "ask")} <= set(batch["targets"][batch["inputs_segmentation"] != 0].tolist())


@pytest.mark.parametrize("way", ["prepared", "streaming"])
def test_rows_with_and_without_loss_on_the_prompt_lie_beside_each_other(tmp_path: Path, way: str):
    """Both settings are used twice in one cache folder. The loss covers the requested tokens in training and
    evaluation."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "ask", "completion": "say"}\n' * 8)
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{tmp_path}/a.jsonl"}
    keys |= {"train_data_columns": "[prompt,completion]", "eval_data_columns": "[prompt,completion]"}
    keys |= {"tokenizer_type": "bytes", "grain_eval_files": f"{tmp_path}/a.jsonl", "eval_interval": 1}
    fingerprints = []
    for only in (True, False, True, False):
        dataset = opened(tmp_path / "cache", **keys, data_pipeline=way, sft_train_on_completion_only=only)
        stream = dataset.train_stream(rows=1)
        batch, _ = next(stream)
        stream.close()
        for found in (batch, dataset.evaluation.rows(np.arange(1))):
            real, loss = found["inputs_segmentation"] != 0, found["targets_segmentation"] != 0
            assert (ord("s") in found["targets"][loss], ord("k") in found["targets"][loss]) == (True, not only)
            assert (loss == real).all() == (not only)
        fingerprints.append(dataset.fingerprint)
    assert fingerprints[:2] == fingerprints[2:]
    assert fingerprints[0] != fingerprints[1]


def test_nothing_to_evaluate_on_is_an_error_that_says_what_to_set(tmp_path: Path):
    write_corpus(tmp_path / "files", "jsonl", count=3)
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{tmp_path}/files/*"}
    keys |= {"eval_interval": 5, "tokenizer_type": "bytes"}
    with pytest.raises(
        UserError, match=r"eval_interval=5, but .* set the files .* a held_out_share, or eval_interval=-1"
    ):
        opened(tmp_path / "cache", **keys, held_out_share=0)
    with pytest.raises(UserError, match=r"0.001 held out: there is no document with text; set a larger held_out_share"):
        opened(tmp_path / "cache", **keys, held_out_share=0.001)


@pytest.mark.parametrize("way", ["prepared", "streaming"])
def test_files_without_any_text_are_refused(tmp_path: Path, way: str):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 5)
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{tmp_path}/a.jsonl"}
    with pytest.raises(UserError, match=r"a.jsonl.*: (there is )?no document (with|has) text"):
        opened(tmp_path / "cache", **keys, tokenizer_type="bytes", data_pipeline=way)


def test_preparing_says_how_far_it_is_even_within_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.data.bar._INTERVAL", 0.01)
    write_corpus(tmp_path / "files", "jsonl", count=300)
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{tmp_path}/files/*"}
    lines: list[str] = []
    encode_many = ByteTokenizer.encode_many

    def slow(self, texts):
        before, until = len(lines), time.monotonic() + 2
        while len(lines) == before and time.monotonic() < until:
            time.sleep(0.001)
        return encode_many(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_many", slow)
    open_dataset(config_of(tmp_path / "cache", **keys, tokenizer_type="bytes", held_out_share=0), lines.append)
    assert any(line.endswith(": 0 s so far") for line in lines)
    shares = [float(line.split(": ")[1].split(" %")[0]) for line in lines if " s left" in line]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 50 < shares[-1] <= 100  # rounded to one digit


def test_the_cache_folder_follows_its_key_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.cache_root("") == tmp_path / ".cache" / "trainer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_root("") == tmp_path / "xdg" / "trainer"
    assert cache.cache_root("~/data") == tmp_path / "data"


def test_synthetic_rows_are_opened(tmp_path: Path):
    dataset = opened(tmp_path, dataset_type="synthetic")
    assert dataset.tokenizer is None
    first, *_, last = eval_batches(dataset.evaluation, 100)
    assert first["inputs"].shape == last["inputs"].shape == (100, LENGTH)
    batch, _ = next(dataset.train_stream(rows=1))
    assert (first["inputs"][0] != batch["inputs"][0]).any()


# A hook that fails the run if it imports TensorFlow or an unused package. The packages can still be found.
HOOK = """
import importlib.machinery, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in refused:
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        raise AssertionError(f"{spec.name} is imported")
    def exec_module(self, module):
        pass
refused = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Refuse())
from trainer.config.load import load
from trainer.data.dataset import open_dataset
for words in sys.argv[2:]:
    dataset = open_dataset(load(words.split("\\n")).config, print)
    stream = dataset.train_stream(rows=2)
    next(stream)
    stream.close()
"""


MOST = "tensorflow,jax,grain,datasets,sentencepiece,tiktoken"


@pytest.mark.parametrize(
    ("refused", "runs"),
    [
        ("tensorflow,tensorflow_datasets,jax,grain,tokenizers", [{"dataset_type": "synthetic"}]),
        (f"{MOST},tensorflow_datasets,array_record,pyarrow.parquet", [{"grain_file_type": "jsonl"}]),
        (MOST, [{"grain_file_type": "tfrecord"}, {"dataset_type": "tfds"}]),
        (
            "tensorflow,datasets,sentencepiece,tiktoken",
            [
                {"grain_file_type": "arrayrecord", "data_pipeline": "streaming"},
                {"dataset_type": "tfds", "data_pipeline": "streaming"},
            ],
        ),
    ],
)
def test_tensorflow_is_never_imported_and_others_only_when_used(corpora, tmp_path: Path, refused: str, runs: list):
    """All runs that may import the same packages share a process."""
    command = [sys.executable, "-c", HOOK, refused]
    for keys in runs:
        keys = {"dataset_type": "grain", "vocab_size": VOCAB, "data_cache_directory": tmp_path / "cache"} | keys
        keys |= {"max_target_length": LENGTH, "eval_interval": -1}
        if keys["dataset_type"] == "grain":
            keys["grain_train_files"] = f"{corpora(keys['grain_file_type'])}/*"
        else:
            write_tfds(tmp_path / "data")
            keys |= {"dataset_path": tmp_path / "data", "dataset_name": "tiny/made"}
        command.append("\n".join(f"{key}={value}" for key, value in keys.items()))
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, done.stderr
