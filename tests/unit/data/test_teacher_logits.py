"""Folders of saved logits: interrupted writes, damage, and folders that belong to other rows."""

import dataclasses
import functools
import json
import os

import numpy as np
import pytest

from trainer.config.errors import UserError
from trainer.data.dataset import Dataset
from trainer.data.streams import PreparedStream
from trainer.data.teacher_logits import MANIFEST, Facts, SavedLogits, hash_of_rows, with_logits, writer

ROWS, LENGTH, K = 10, 4, 3
IDENTITY = {"way": "prepared", "documents": "some", "length": LENGTH, "order": "seed 1"}


class Source:
    """Rows that contain their index."""

    size, length = ROWS, LENGTH

    def rows(self, indices):
        return {"inputs": np.broadcast_to(indices[:, None], (len(indices), LENGTH)).astype(np.int32)}


SOURCE = Source()


def dataset(source=SOURCE, **identity):
    open_stream = functools.partial(PreparedStream, seed=3, shuffle=True)
    return Dataset(None, None, IDENTITY | identity, "", open_stream, source=source)


def facts(**changes):
    own = {"data": hash_of_rows(dataset()), "rows": ROWS, "length": LENGTH, "k": K, "vocab_size": 70_000}
    own |= {"tokens": 69_999, "temperature": 2.0, "dtype": "bfloat16", "teacher": "a", "shard_rows": 4}
    return Facts(**own | changes)


def batches(rows):
    """Yields records of two rows, which contain the row's index."""
    for first in range(rows.start, rows.stop, 2):
        index = np.arange(first, min(first + 2, rows.stop))[:, None, None]
        every = np.broadcast_to(index, (len(index), LENGTH, K))
        yield {"teacher_logits": every / 4, "teacher_tokens": every + 65_536, "teacher_others": every[..., 0] - 0.5}


def save(folder, say=lambda name: None, **changes):
    """Returns the names of the shards that the call wrote."""
    with writer(str(folder), facts(**changes), "somewhere") as (left, write):
        for name, rows in left.items():
            say(name)
            write(name, batches(rows))
    return [*left]


def test_batches_have_the_logits_of_their_rows_in_the_order_of_training(tmp_path):
    assert save(tmp_path / "out") == ["shard-000000", "shard-000001", "shard-000002"]
    stream = with_logits(dataset(), str(tmp_path / "out")).train_stream(rows=5)
    seen = []
    for batch, _ in (next(stream), next(stream)):
        index = batch["inputs"][..., None].astype(np.float32)
        assert batch["teacher_logits"].dtype.name == "bfloat16"
        np.testing.assert_array_equal(batch["teacher_logits"].astype(np.float32), np.repeat(index, K, -1) / 4)
        np.testing.assert_array_equal(batch["teacher_tokens"], np.repeat(index, K, -1) + 65_536)
        np.testing.assert_array_equal(batch["teacher_others"], index[..., 0] - 0.5)
        seen += batch["inputs"][:, 0].tolist()
    assert sorted(seen) == [*range(ROWS)] != seen


def test_the_same_command_continues_an_interrupted_one(tmp_path):
    save(tmp_path / "whole")

    def killed(name):
        if name == "shard-000001":
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        save(out, killed)
    (out / f"shard-000001.incomplete-{os.getpid() + 1}").write_bytes(b"a part")
    kept = (out / "shard-000000").stat().st_mtime_ns
    with pytest.raises(UserError, match="2 of 3 shards are not saved yet"):
        SavedLogits(str(out))
    assert save(out) == ["shard-000001", "shard-000002"]
    assert (out / "shard-000000").stat().st_mtime_ns == kept
    (out / "shard-000002").unlink()
    assert save(out, shard_rows=2) == ["shard-000002"]  # with the shards of the first command
    assert not save(out)
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert SavedLogits(str(out)).identity == SavedLogits(str(tmp_path / "whole")).identity


def test_a_folder_of_other_logits_or_files_is_not_written(tmp_path):
    save(tmp_path / "out")
    with pytest.raises(UserError, match=r"k 3 -> 2, teacher a -> b; choose a new folder"):
        save(tmp_path / "out", k=2, teacher="b")
    with pytest.raises(UserError, match="has other files"):
        save(tmp_path)


def test_a_changed_byte_is_found_when_its_row_is_read(tmp_path):
    save(tmp_path)
    file = tmp_path / "shard-000001"
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    file.write_bytes(data)
    saved = SavedLogits(str(tmp_path))
    saved.rows(np.array([3]))
    with pytest.raises(UserError, match="shard-000001 has changed since it was written"):
        saved.rows(np.array([3, 4]))
    file.write_bytes(data[1:])
    with pytest.raises(UserError, match="shard-000001 does not have"):
        SavedLogits(str(tmp_path))


def test_a_damaged_manifest_is_refused(tmp_path):
    save(tmp_path)
    content = json.loads((tmp_path / MANIFEST).read_text())
    for changes in (
        {"rows": "ten"},
        {"dtype": "object"},
        {"k": 80_000},
        {"tokens": 70_001},
        {"k": 70_000, "tokens": 70_001},
        {"shard_rows": 0},
    ):
        (tmp_path / MANIFEST).write_text(json.dumps(content | changes))
        with pytest.raises(UserError, match="is damaged"):
            SavedLogits(str(tmp_path))


def test_all_logits_may_be_saved_although_the_student_has_fewer_tokens(tmp_path):
    save(tmp_path, vocab_size=K, tokens=K - 1)
    assert SavedLogits(str(tmp_path)).facts == facts(vocab_size=K, tokens=K - 1)


def test_logits_of_other_rows_are_refused(tmp_path):
    save(tmp_path)
    with_logits(dataset(order="seed 2"), str(tmp_path))
    for other in (dataset(documents="others"), dataset(length=8)):
        with pytest.raises(UserError, match="the logits belong to other rows"):
            with_logits(other, str(tmp_path))
    for source in (None, dataclasses.make_dataclass("Endless", [("size", None, None)])()):
        with pytest.raises(UserError, match="mixtures, streamed and synthetic rows have no stored order"):
            with_logits(dataset(source), str(tmp_path))
