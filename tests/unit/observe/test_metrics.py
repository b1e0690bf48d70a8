"""metrics.jsonl is read back as it was written."""

import json
import math

import numpy as np
import pytest

from trainer.config.errors import UserError
from trainer.observe.events import EVENTS_FILE, EventsWriter
from trainer.observe.metrics import MetricsWriter, TokensSeen, read_rows


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_floats_come_back_to_the_bit(tmp_path):
    row = {"step": 0, "loss": 0.1 + 0.2, "lm_loss": float(np.float32(1 / 3)), "tokens": 2**53 + 1, "note": "ä\n"}
    with MetricsWriter(tmp_path) as writer:
        writer.write(row)
    assert read(tmp_path) == [row]


def test_values_that_are_not_finite(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write({"loss": math.nan, "grad_norm": math.inf, "z": -math.inf})
    (row,) = read(tmp_path)
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["z"]) == (math.inf, -math.inf)


def test_each_row_is_on_disk_when_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(3):
            writer.write({"step": step})
            assert [row["step"] for row in read(tmp_path)] == list(range(step + 1))


def test_a_later_process_goes_on_behind_the_rows_that_its_checkpoint_covers(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(5):
            writer.write({"step": step, "loss": 1 / 3})
        writer.write({"step": 4, "eval_loss": 1.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with MetricsWriter(tmp_path, 3) as writer:
        assert [row["step"] for row in writer.kept] == [0, 1, 2]
        assert before.startswith((tmp_path / "metrics.jsonl").read_bytes())
        writer.write({"step": 3, "loss": 1 / 3})
    assert [row["step"] for row in read(tmp_path)] == [0, 1, 2, 3]
    with MetricsWriter(tmp_path) as writer:
        assert writer.kept == read(tmp_path) == []


@pytest.mark.parametrize("torn", ['{"step": 1, "lo', '{"step": 1}', "{", "\0\0"])
def test_a_line_that_was_cut_off_is_removed(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + torn, encoding="utf-8")
    assert read_rows(path) == [{"step": 0}]
    with MetricsWriter(tmp_path, 5) as writer:
        writer.write({"step": 5})
    assert read(tmp_path) == [{"step": 0}, {"step": 5}]


@pytest.mark.parametrize("content", ["garbage", "\ufffd\ufffd", '{"step": 0}\ngarbage', "[" * 100_000])
def test_garbage_is_no_line_that_was_cut_off(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"is damaged: line [12] is not a row"):
        MetricsWriter(tmp_path, 5)
    assert path.read_text(encoding="utf-8") == content


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("name", ["metrics.jsonl", EVENTS_FILE])
def test_a_file_that_is_removed_or_replaced_during_a_run_is_written_again(tmp_path, name, replaced):
    said, path = [], tmp_path / name
    with (MetricsWriter if name == "metrics.jsonl" else EventsWriter)(tmp_path, say=said.append) as writer:
        writer.write({"step": 0})
        before = path.read_bytes()
        path.unlink()
        if replaced:
            path.write_bytes(b"mine")
        writer.write({"step": 1})
        writer.write({"step": 2})
        writer.sync()
    data = path.read_bytes()
    assert data.startswith(before)
    assert len(said) == 1
    assert str(path) in said[0]
    if name == "metrics.jsonl":
        assert [row["step"] for row in read(tmp_path)] == [0, 1, 2]
    assert [it.read_bytes() for it in path.parent.glob("*.1")] == [b"mine"] * replaced


def test_an_old_owner_leaves_the_file_of_the_new_owner(tmp_path):
    def check():
        raise UserError("taken over")

    with MetricsWriter(tmp_path, check=check) as old, MetricsWriter(tmp_path, 5) as new:
        with pytest.raises(UserError, match="taken over"):
            old.write({"step": 0})
        new.write({"step": 5})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert read(tmp_path) == [{"step": 5}]


@pytest.mark.parametrize("line", ["", "{", "[]", '{"loss": 1}', "\0\0"])
def test_another_line_that_is_no_row_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 1}}\n')
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged: line 2 is not a row"):
        MetricsWriter(tmp_path, 1)
    assert path.read_bytes() == before


def test_the_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsWriter(tmp_path, 1)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'
    monkeypatch.undo()
    with MetricsWriter(tmp_path, 1) as writer:
        assert writer.kept == read(tmp_path) == [{"step": 0}]


@pytest.mark.parametrize(
    ("resumes", "ending"),
    [
        (True, "; the committed checkpoints are intact: free disk space and run the same command again"),
        (False, ": free disk space. The run saves no checkpoints, so it would start over"),
    ],
)
def test_a_full_disk_is_one_message(tmp_path, resumes, ending):
    with MetricsWriter(tmp_path, resumes=resumes) as writer:
        writer._file.close()
        writer._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        with pytest.raises(UserError) as error:
            writer.write({"step": 0})
    assert str(error.value) == f"cannot write {tmp_path}/metrics.jsonl: No space left on device{ending}"


def test_an_array_is_refused_and_leaves_no_trace(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(TypeError):
            writer.write({"step": 0, "loss": np.float32(1)})
        writer.write({"step": 1})
    assert read(tmp_path) == [{"step": 1}]


def test_leaving_the_context_closes(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        pass
    with pytest.raises(ValueError, match="closed file"):
        writer.write({"step": 0})


def test_tokens_are_counted_from_the_rows_that_are_kept():
    """The count exceeds 32 bits. Evaluation rows have no training tokens, and edited rows are ignored."""
    edited = [{"step": 0, "tokens": odd} for odd in (None, "9", [9], 9.5)]
    seen = TokensSeen([*edited, {"step": 0, "tokens": 2**31}, {"step": 0, "eval_loss": 1.0}, {"step": 1, "tokens": 5}])
    assert [seen.add({"step": step, "tokens": 3})["tokens_seen"] for step in (2, 3)] == [2**31 + 8, 2**31 + 11]
