"""The file with the results of earlier compilations."""

import jax
import pytest
from support import tiny_config

from trainer.aot.chips import FRACTIONS
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.planning import journal as journals
from trainer.planning.journal import Journal, program_key


def row_of(key, outcome="fits"):
    return {"key": key, "outcome": outcome, "reason": "", "report": {}, "wall_seconds": 1.5, "again": False}


def test_rows_are_read_again_and_a_half_written_one_is_ignored(tmp_path):
    path = tmp_path / "below" / "plan.jsonl"
    journal = Journal(path)
    journal.add(row_of("a"))
    journal.add(row_of("b", "failed"))
    with path.open("ab") as file:
        file.write(b'{"key": "c", "outc')
    again = Journal(path)
    assert again.rows == {"a": row_of("a"), "b": row_of("b", "failed")}
    again.add(row_of("c"))
    assert {*Journal(path).rows} == {"a", "b", "c"}


def test_a_row_of_another_plan_is_not_lost(tmp_path, monkeypatch):
    """Another plan adds a row while this one reads the file."""
    path = tmp_path / "plan.jsonl"
    other = Journal(path)
    other.add(row_of("a"))
    read = type(path).read_bytes

    def read_and_add(self):
        content = read(self)
        other.add(row_of("b"))
        return content

    monkeypatch.setattr(type(path), "read_bytes", read_and_add)
    journal = Journal(path)
    monkeypatch.undo()
    journal.add(row_of("c"))
    assert {*Journal(path).rows} == {"a", "b", "c"}


@pytest.mark.parametrize("line", ["{}", "[1]", "not JSON", "7", '{"key": "abc", "outcome": "fits"}'])
def test_another_file_is_refused_and_kept(tmp_path, line):
    path = tmp_path / "plan.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(UserError, match="line 1 is not a row of a plan"):
        Journal(path)
    assert path.read_text() == f"{line}\n"


@pytest.mark.parametrize("text", ["my notes", '{"key": 7', "\n"])
def test_an_unfinished_line_of_another_file_is_kept(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(UserError, match="line 1 is not a row of a plan"):
        Journal(path)
    assert path.read_text() == text


def test_a_folder_is_an_error(tmp_path):
    with pytest.raises(UserError, match="Is a directory; give another journal=FILE"):
        Journal(tmp_path)


@pytest.mark.parametrize("name", FRACTIONS)
def test_the_key_depends_on_the_fraction_of_a_gpus_memory(name, monkeypatch):
    keys = set()
    for value in ("0.8", "0.9"):
        monkeypatch.setenv(name, value)
        journals._surroundings.cache_clear()
        keys.add(program_key(tiny_config("nnx")))
    journals._surroundings.cache_clear()
    assert len(keys) == 2


def test_the_key_is_of_what_determines_the_program(monkeypatch, digests):
    config = tiny_config("nnx")

    def key(**changes):
        return program_key(Config(dict(config.items()) | changes))

    assert key(run_name="x", steps=7, learning_rate_schedule_steps=config.learning_rate_schedule_steps) == key()
    assert len({key(), key(remat_policy="full"), key(compile_topology="v5e-4"), key(base_emb_dim=32)}) == 4
    before = key()
    journals._surroundings.cache_clear()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_x=true")
    assert key() != before
    journals._surroundings.cache_clear()
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    with jax.default_matmul_precision("highest"):
        assert key() != before
    journals._surroundings.cache_clear()
    assert key() == before
    digests.append("two")
    journals._surroundings.cache_clear()
    assert key() != before


def test_a_bucket_holds_no_journal():
    config = tiny_config("nnx", base_output_directory="gs://bucket/runs")
    with pytest.raises(UserError, match="base_output_directory=gs://bucket/runs: give journal=FILE, a local file"):
        journals.default_path(config)
