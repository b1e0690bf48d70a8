"""Megatron-LM's files of token ids: rows against a plain reading of the documents, damaged files, resuming."""

import json
import os
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from megatron_files import documents_of, write_indexed
from sample_data import LENGTH, opened
from stream_cases import assert_same, batches

from trainer.config.errors import UserError
from trainer.data.batches import FIELDS

EOD, VOCAB = 0, 200
PLAIN = {"mmap_eod_id": EOD, "held_out_share": 0, "enable_data_shuffling": False}


@pytest.fixture
def tokens(tmp_path: Path):
    """Returns a function that opens the files `name` of the folder with the given keys."""

    def open_files(name: str = "a", **keys):
        shared = {"dataset_type": "grain", "grain_file_type": "mmap", "vocab_size": VOCAB}
        return opened(tmp_path / "cache", **shared | {"grain_train_files": tmp_path / name} | keys)

    return open_files


def write(prefix: Path, documents, *args, **kwargs):
    write_indexed(prefix, [[document] for document in documents], *args, **kwargs)


def rows_of(dataset, count: int) -> dict[str, np.ndarray]:
    """Returns the first `count` rows of a stream: each field [count, length]."""
    stream = dataset.train_stream(rows=1)
    found = [next(stream)[0] for _ in range(count)]
    return {name: np.concatenate([batch[name] for batch in found]) for name in FIELDS}


def expected(documents, *, reset: bool, mask: bool, eod: int, shortest: int = 0) -> list[dict[str, list[int]]]:
    """Returns the rows of the documents, token by token, by Megatron-LM's rules."""
    stream, ends = [], []
    for document in documents:
        stream += document
        ends += [token == eod if eod >= 0 else i == len(document) - 1 for i, token in enumerate(document)]
    rows = []
    for first in range(0, len(stream) - 1, LENGTH):
        row = {name: [] for name in FIELDS}
        segment, begin = 1, first
        for at in range(first, first + LENGTH):
            inside = at + 1 < len(stream)
            if inside and reset and at > first and ends[at - 1] and at - begin > shortest:
                segment, begin = segment + 1, at
            row["inputs"].append(stream[at] if inside else 0)
            row["targets"].append(stream[at + 1] if inside else 0)
            row["inputs_position"].append(at - begin if inside else 0)
            row["inputs_segmentation"].append(segment if inside else 0)
            row["targets_segmentation"].append(segment if inside and not (mask and ends[at]) else 0)
        rows.append(row)
    return rows


@pytest.mark.parametrize("eod", [EOD, -1])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("reset", "most"), [(False, -1), (True, -1), (True, 4), (True, 25)])
def test_rows_are_those_of_a_plain_reading(tmp_path: Path, tokens, reset: bool, most: int, mask: bool, eod: int):
    documents = documents_of(40, longest=30)
    documents[3] = [5, EOD, 6, 7]  # has the token inside, but not at the end
    documents[5] = []
    write(tmp_path / "a", documents)
    keys = PLAIN | {"reset_attention_mask": reset, "eod_mask_loss": mask, "mmap_eod_id": eod}
    wanted = expected(documents, reset=reset, mask=mask, eod=eod, shortest={4: LENGTH // 4}.get(most, 0))
    found = rows_of(tokens(**keys, packing_max_segments_per_sample=most), len(wanted) + 1)
    for i, row in enumerate([*wanted, wanted[0]]):  # after the last row, the first row follows
        for name in FIELDS:
            assert found[name][i].tolist() == row[name], (i, name)


@pytest.mark.parametrize("eod", [EOD, -1])
def test_rows_go_on_over_files_and_held_out_documents(tmp_path: Path, tokens, eod: int):
    documents = documents_of(60, longest=9)
    for i in range(3):
        write(tmp_path / f"{i}", documents[20 * i : 20 * i + 20])
    keys = PLAIN | {"grain_train_files": tmp_path, "mmap_eod_id": eod, "held_out_share": 0.25, "eval_interval": 5}
    dataset = tokens(**keys, eod_mask_loss=True)
    kept = [document for i, document in enumerate(documents) if i % 4]
    for found, chosen in ((dataset.evaluation, documents[::4]), (None, kept)):
        wanted = expected(chosen, reset=True, mask=True, eod=eod)
        batch = found.rows(np.arange(found.size)) if found else rows_of(dataset, len(wanted))
        assert all(batch[name].tolist() == [row[name] for row in wanted] for name in FIELDS)


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u2", "i4", "i8"])
@pytest.mark.parametrize("counts_documents", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_every_form_of_the_files_gives_the_same_rows(tmp_path: Path, tokens, dtype, counts_documents, parts):
    documents = documents_of(30, vocab_size=100)
    sequences = [[document[i : i + 7] for i in range(0, len(document), 7)][:parts] for document in documents]
    whole = [[token for sequence in document for token in sequence] for document in sequences]
    write_indexed(tmp_path / "a", sequences, dtype, counts_documents=counts_documents)
    wanted = expected(whole, reset=True, mask=True, eod=-1)
    found = rows_of(tokens(**PLAIN | {"mmap_eod_id": -1, "eod_mask_loss": True}), len(wanted))
    assert all(found[name].tolist() == [row[name] for row in wanted] for name in FIELDS)


def test_a_tokenizer_changes_no_token(tmp_path: Path, tokens):
    write(tmp_path / "a", documents_of(30))
    plain, other = tokens(**PLAIN), tokens(**PLAIN, tokenizer_type="bytes", vocab_size=300)
    assert other.tokenizer is not None
    assert plain.tokenizer is None
    np.testing.assert_array_equal(rows_of(plain, 9)["inputs"], rows_of(other, 9)["inputs"])


def header(path: Path, **changes):
    """Changes fields of the header of an index, or bytes at an offset."""
    data = bytearray(path.read_bytes())
    at = {"magic": (0, "<9s"), "version": (9, "<Q"), "code": (17, "<B"), "sequences": (18, "<Q"), "entries": (26, "<Q")}
    for name, value in changes.items():
        struct.pack_into(at[name][1], data, at[name][0], value)
    path.write_bytes(data)


def put(path: Path, at: int, kind: str, value: int):
    data = bytearray(path.read_bytes())
    struct.pack_into(kind, data, at, value)
    path.write_bytes(data)


def backwards(idx: Path):
    """Gives the index a sequence that is far too long and one of negative length, with pointers to match."""
    sizes = np.frombuffer(idx.read_bytes(), "<i4", 20, SIZES).copy()
    sizes[3:5] += [5000, -5000]
    for i, start in enumerate(np.cumsum(np.append(0, sizes))[:-1] * 4):
        put(idx, SIZES + 4 * i, "<i", sizes[i])
        put(idx, STARTS + 8 * i, "<q", start)


SIZES, STARTS, FIRST = 34, 34 + 4 * 20, 34 + 12 * 20
DAMAGE = {
    "magic": (lambda idx, bin_: header(idx, magic=b"MMIDIDY\0\0"), "a.idx is not an index of Megatron-LM"),
    "empty index": (lambda idx, bin_: idx.write_bytes(b""), "a.idx cannot be read"),
    "only the header's beginning": (lambda idx, bin_: os.truncate(idx, 20), "a.idx is not an index"),
    "version": (lambda idx, bin_: header(idx, version=2), "a.idx has version 2; only version 1"),
    "code": (lambda idx, bin_: header(idx, code=0), "a.idx has type code 0"),
    "floats": (lambda idx, bin_: header(idx, code=6), "a.idx has type code 6"),
    "truncated index": (lambda idx, bin_: os.truncate(idx, 300), "a.idx is damaged: 20 sequences"),
    "too many sequences": (lambda idx, bin_: header(idx, sequences=1 << 61), "a.idx is damaged"),
    "too many documents": (lambda idx, bin_: header(idx, entries=1 << 63), "a.idx is damaged"),
    "modes": (lambda idx, bin_: idx.write_bytes(idx.read_bytes() + bytes(20)), "multimodal"),
    "negative size": (lambda idx, bin_: put(idx, SIZES, "<i", -1), "a.idx is damaged: the offsets"),
    "size and pointers that agree": (lambda idx, bin_: backwards(idx), "a.idx is damaged: the offsets"),
    "larger size": (lambda idx, bin_: put(idx, SIZES + 76, "<i", 1 << 30), "do not belong together"),
    "pointer out of range": (lambda idx, bin_: put(idx, STARTS + 8, "<q", 1 << 40), "a.idx is damaged: the offsets"),
    "negative pointer": (lambda idx, bin_: put(idx, STARTS + 80, "<q", -8), "a.idx is damaged: the offsets"),
    "first document": (lambda idx, bin_: put(idx, FIRST, "<q", 1), "a.idx is damaged: its document index"),
    "document out of range": (lambda idx, bin_: put(idx, FIRST + 40, "<q", 99), "a.idx is damaged: its document"),
    "last document": (lambda idx, bin_: put(idx, FIRST + 160, "<q", 19), "a.idx is damaged: its document index"),
    "truncated tokens": (lambda idx, bin_: os.truncate(bin_, 40), "a.bin has 40 bytes, but .*a.idx describes"),
    "part of a token": (lambda idx, bin_: bin_.write_bytes(bin_.read_bytes()[:-1]), "a.bin has .* truncated"),
    "more tokens": (lambda idx, bin_: bin_.write_bytes(bin_.read_bytes() + bytes(4)), "a.bin has .* truncated"),
    "other type": (lambda idx, bin_: header(idx, code=8), "offsets of its sequences"),
    "no tokens file": (lambda idx, bin_: bin_.unlink(), "a.bin cannot be read: No such file"),
    "no index": (lambda idx, bin_: idx.unlink(), "grain_train_files: there is no .*a.idx, and no folder"),
    "large token": (
        lambda idx, bin_: put(bin_, 8, "<i", VOCAB),
        f"a.bin, document 0, holds token {VOCAB} and vocab_si",
    ),
    "negative token": (lambda idx, bin_: put(bin_, 8, "<i", -3), "a.bin, document 0, holds token -3 and"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_files_are_one_error_that_names_them(tmp_path: Path, tokens, what: str):
    write(tmp_path / "a", [[4, 5, 6, *document] for document in documents_of(20)])
    change, message = DAMAGE[what]
    change(tmp_path / "a.idx", tmp_path / "a.bin")
    with pytest.raises(UserError, match=message):
        rows_of(tokens(**PLAIN), 1)


@pytest.mark.rest(covered_by="the first seed", cases=("1", "2"))
@pytest.mark.parametrize("seed", range(3))
def test_no_damage_of_an_index_reads_outside_of_the_files(tmp_path: Path, tokens, seed: int):
    random = np.random.default_rng(seed)
    write(tmp_path / "a", documents_of(8))
    good = (tmp_path / "a.idx").read_bytes()
    for _ in range(300):
        data = np.frombuffer(good, np.uint8).copy()
        data[random.integers(len(data), size=random.integers(1, 4))] = random.integers(256)
        (tmp_path / "a.idx").write_bytes(data[: random.integers(len(data) // 2, len(data) + 1)].tobytes())
        try:
            dataset = tokens(**PLAIN | {"mmap_eod_id": -1})
        except UserError:
            continue
        # Damage that is not refused only divides the same tokens into other documents.
        stream = np.fromfile(tmp_path / "a.bin", "<i4")
        found = rows_of(dataset, -(-(len(stream) - 1) // LENGTH))["inputs"].ravel()[: len(stream) - 1]
        np.testing.assert_array_equal(found, stream[:-1])


def test_a_wrong_token_for_the_end_of_documents_is_an_error(tmp_path: Path, tokens):
    write(tmp_path / "a", documents_of(30, eod=7))
    with pytest.raises(UserError, match=r"mmap_eod_id=0, but none of the first 20 documents of .*a.bin .* ends with 7"):
        tokens(mmap_eod_id=0)
    neither = {"reset_attention_mask": False, "eod_mask_loss": False}
    for keys in ({"mmap_eod_id": 7}, {"mmap_eod_id": -1}, neither | {"mmap_eod_id": 0}):
        tokens(**keys)


def test_an_empty_document_has_no_last_token(tmp_path: Path, tokens):
    """The check must not use the preceding document's last token. For the first document, this would be the last token
    of the file."""
    write(tmp_path / "a", [[], *documents_of(25, eod=7), [5, 0]])
    with pytest.raises(UserError, match=r"none of the first 19 documents of .*a.bin .* ends with 7"):
        tokens(mmap_eod_id=0)


def test_names_of_files(tmp_path: Path, tokens):
    for i in range(3):
        (tmp_path / "data").mkdir(exist_ok=True)
        write(tmp_path / f"data/s{i}_text", documents_of(9, seed=i))
    documents = [document for i in range(3) for document in documents_of(9, seed=i)]
    wanted = [row["inputs"] for row in expected(documents, reset=True, mask=False, eod=EOD)]
    data = tmp_path / "data"
    npy = {"grain_file_type": "mmap_npy"}
    (tmp_path / "mixture.json").write_text(json.dumps({"all": {"path": str(data), "weight": 2}}))
    for keys in (
        {"grain_train_files": data},
        {"grain_train_files": f"{data}/"},
        {"grain_train_files": f"{data}/*"},
        {"grain_train_files": f"{data}/s*_text"},
        {"grain_train_files": f"{data}/*.bin"},
        {"grain_train_files": f"{data}/*.idx,1"},
        {"grain_train_files": "", "grain_train_mixture_config_path": tmp_path / "mixture.json"},
        npy | {"grain_train_files": f"{tmp_path}/index|{data}/s2_text:{data}/s0_text:{data}/s1_text"},
        npy | {"grain_train_files": f"{tmp_path}/index|{data}"},
        npy | {"grain_train_files": data},
    ):
        assert rows_of(tokens(**PLAIN | keys), len(wanted))["inputs"].tolist() == wanted, keys


def test_a_mixture_has_rows_in_the_ratio_of_its_weights(tmp_path: Path, tokens):
    write(tmp_path / "a", [[*range(1, 80), EOD]] * 20)
    write(tmp_path / "b", [[*range(101, 180), EOD]] * 20)
    dataset = tokens(grain_train_files=f"{tmp_path}/a,0.25;{tmp_path}/b,0.75", mmap_eod_id=EOD)
    inputs = rows_of(dataset, 40)["inputs"]
    assert (inputs.max(axis=1) < 100).sum() == 10


def test_an_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path: Path, tokens):
    documents = documents_of(40)
    write(tmp_path / "a", documents)
    wanted = sorted(row["inputs"] for row in expected(documents, reset=True, mask=False, eod=EOD))
    found = rows_of(tokens(**PLAIN | {"enable_data_shuffling": True}), 2 * len(wanted))["inputs"].tolist()
    first, second = found[: len(wanted)], found[len(wanted) :]
    assert sorted(first) == sorted(second) == wanted
    assert len({str(order) for order in (first, second, wanted)}) == 3


def test_a_position_continues_exactly_on_any_number_of_processes(tmp_path: Path, tokens):
    write(tmp_path / "a", documents_of(60))
    write(tmp_path / "b", documents_of(90, seed=1))
    keys = {"grain_train_files": f"{tmp_path}/a,2;{tmp_path}/b,1", "mmap_eod_id": EOD}
    straight = batches(tokens(**keys), 30)
    for stop in (1, 7, 20):
        position = json.loads(json.dumps(straight[stop - 1][1]))
        assert_same(batches(tokens(**keys), 30 - stop, position), straight[stop:])
        parts = [batches(tokens(**keys), 30 - stop, position, process_index=i, process_count=2) for i in range(2)]
        for (batch, _), *both in zip(straight[stop:], *parts, strict=True):
            for name in FIELDS:
                np.testing.assert_array_equal(batch[name], np.concatenate([part[name] for part, _ in both]))


@pytest.mark.parametrize(
    "change",
    [
        {"mmap_eod_id": -1},
        {"reset_attention_mask": False},
        {"eod_mask_loss": True},
        {"packing_max_segments_per_sample": 4},
        {"held_out_share": 0.3},
        {"vocab_size": VOCAB + 1},
        {"data_shuffle_seed": 1},
        {"max_target_length": LENGTH + 1},
        {"grain_file_type": "mmap_npy", "mmap_npy_split": "9,1"},
    ],
    ids=str,
)
def test_a_position_in_other_rows_is_refused(tmp_path: Path, change: dict):
    write(tmp_path / "a", documents_of(40))
    keys = {"dataset_type": "grain", "grain_file_type": "mmap", "grain_train_files": tmp_path / "a"}
    keys |= {"mmap_eod_id": EOD, "vocab_size": VOCAB}
    ((_, position),) = batches(opened(tmp_path / "cache", **keys), 1)
    with pytest.raises(UserError, match="belongs to other data"):
        batches(opened(tmp_path / "cache", **keys | change), 1, position)


def documents_in(inputs: np.ndarray, segmentation: np.ndarray) -> list[tuple[int, ...]]:
    """Returns the documents in consecutive rows. The last token is missing, because it has no target."""
    stream = inputs[segmentation != 0].tolist()
    ends = [-1, *(i for i, token in enumerate(stream) if token == EOD)]
    return [tuple(stream[a + 1 : b + 1]) for a, b in pairwise(ends)]


def test_held_out_documents_are_not_trained_on(tmp_path: Path, tokens):
    documents = [[1 + i % 190, 1 + i // 190, 9, EOD] for i in range(400)]
    write(tmp_path / "a", documents[:150])
    write(tmp_path / "b", documents[150:])
    keys = PLAIN | {"grain_train_files": tmp_path, "held_out_share": 0.1, "eval_interval": 5}
    dataset = tokens(**keys)
    batch = dataset.evaluation.rows(np.arange(dataset.evaluation.size))
    held = documents_in(batch["inputs"], batch["inputs_segmentation"])
    assert len(held) == 40 - 1  # the very last token has no target, so it is not an input
    # They are spread over the files.
    numbers = [documents.index(list(document)) for document in held]
    assert all(9 <= b - a <= 11 for a, b in pairwise(numbers))
    batch = rows_of(dataset, 360 * 4 // LENGTH)
    train = set(documents_in(batch["inputs"], batch["inputs_segmentation"]))
    assert not train & set(held)
    assert len(train) == 360 - 1
    assert "360 documents, 1,440 trained tokens; held out 40 documents, 160 evaluated tokens" in str(dataset)


# The last case is rounded as in MaxText 0.2.5: as floats, 0.7 + 0.2 is less than 0.9.
@pytest.mark.parametrize(
    ("split", "bounds"), [("99,1", (99, 100, 100)), ("0.9,0.05,0.05", (90, 95, 100)), ("7,2,1", (38, 49, 55))]
)
def test_mmap_npy_split_takes_documents_in_order(tmp_path: Path, tokens, split: str, bounds):
    documents = [[1 + i, *[9] * 60, EOD] for i in range(bounds[-1])]
    write(tmp_path / "a", documents[:30])
    write(tmp_path / "b", documents[30:])
    keys = PLAIN | {"grain_file_type": "mmap_npy", "grain_train_files": tmp_path, "mmap_npy_split": split}
    dataset = tokens(**keys | {"held_out_share": 0.5, "eval_interval": 1})
    batch = dataset.evaluation.rows(np.arange(dataset.evaluation.size))
    middle, end, _ = bounds
    firsts = [token - 1 for token in batch["inputs"].ravel().tolist() if token not in (0, 9)]
    assert firsts == [i for i in range(middle, end) if i != 8]
    assert f"{middle} documents" in str(dataset)


def test_evaluation_files_are_read_whole_and_once(tmp_path: Path, tokens):
    write(tmp_path / "a", documents_of(30))
    write(tmp_path / "e1", documents_of(9, seed=1))
    write(tmp_path / "e2", documents_of(9, seed=2))
    both = documents_of(9, seed=1) + documents_of(9, seed=2)
    dataset = tokens(mmap_eod_id=EOD, grain_eval_files=f"{tmp_path}/e1;{tmp_path}/e2", eval_interval=5)
    wanted = expected(both, reset=True, mask=False, eod=EOD)
    assert dataset.evaluation.rows(np.arange(len(wanted)))["targets"].tolist() == [row["targets"] for row in wanted]
    assert dataset.evaluation.size == len(wanted)
    assert "30 documents" in str(dataset)


def test_nothing_to_train_or_to_evaluate_on_is_an_error(tmp_path: Path, tokens):
    write(tmp_path / "a", documents_of(30))
    write(tmp_path / "one", [[EOD]])
    write(tmp_path / "none", [])
    with pytest.raises(UserError, match=r"nothing to evaluate on: set .*grain_eval_files"):
        tokens(held_out_share=0, eval_interval=5)
    with pytest.raises(UserError, match="fewer than two tokens are held out; change held_out_share"):
        tokens("one", held_out_share=0.01, eval_interval=5)
    for name in ("one", "none"):
        with pytest.raises(UserError, match=f"{name}: fewer than two tokens remain"):
            tokens(name, held_out_share=0)


def test_eight_documents_whose_number_is_in_the_header_are_no_multimodal_set(tmp_path: Path, tokens):
    """With eight documents, the last entry of the document index has as many bytes as the modes of eight sequences."""
    documents = [[[i + 1, i + 2, i + 3]] for i in range(8)]
    write_indexed(tmp_path / "a", documents, counts_documents=True)
    assert tokens("a", held_out_share=0.0, eval_interval=-1)


def test_evaluation_files_beside_a_split_are_divided_by_it_too(tmp_path: Path, tokens):
    """Training uses the first part of the training files, and evaluation the second part of the evaluation files."""
    documents = [[1 + i, *[9] * 60, EOD] for i in range(40)]
    write(tmp_path / "a", documents[:20])
    write(tmp_path / "e", documents[20:])
    keys = PLAIN | {"grain_file_type": "mmap_npy", "mmap_npy_split": "3,1", "eval_interval": 1}
    dataset = tokens(**keys | {"grain_eval_files": tmp_path / "e"})
    batch = dataset.evaluation.rows(np.arange(dataset.evaluation.size))
    assert [token - 1 for token in batch["inputs"].ravel().tolist() if token not in (0, 9)] == [*range(35, 40)]
    assert "15 documents" in str(dataset)
