"""The file with the results of earlier compilations."""

import json

import pytest
from support import tiny_config

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.planning import journal as journals
from trainer.planning.journal import Journal, program_key


def test_rows_are_read_again_and_a_half_written_one_is_removed(tmp_path):
    path = tmp_path / "below" / "plan.jsonl"
    journal = Journal(path)
    journal.add({"key": "a", "outcome": "fits"})
    journal.add({"key": "b", "outcome": "failed"})
    with path.open("ab") as file:
        file.write(b'{"key": "c", "outc')
    again = Journal(path)
    assert again.rows == {"a": {"key": "a", "outcome": "fits"}, "b": {"key": "b", "outcome": "failed"}}
    again.add({"key": "c", "outcome": "fits"})
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "b", "c"]


@pytest.mark.parametrize("line", ["{}", "[1]", "not JSON", "7"])
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


def test_the_key_is_of_what_determines_the_program(monkeypatch):
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
