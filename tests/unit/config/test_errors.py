"""Messages: suggestions, and that no message exceeds a screen."""

import pytest

from trainer.config.errors import SCREEN_COLUMNS, SCREEN_LINES, UserError, nearest, report
from trainer.config.load import load
from trainer.config.schema import schema


def rows(text: str) -> int:
    return sum(max(1, -(-len(line) // SCREEN_COLUMNS)) for line in text.splitlines())


@pytest.mark.parametrize("word", ["wandb", "qqqqqq", "memorization", "lr", "verbose"])
def test_nothing_is_suggested_where_nothing_is_near(word):
    assert nearest(word, schema().keys) == ""


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("learing_rate", "learning_rate"),
        ("num_steps", "steps"),
        ("emb_dim", "base_emb_dim"),
        ("device_batch_size", "per_device_batch_size"),
        ("num_layers", "base_num_decoder_layers"),
        ("weight_decay", "adam_weight_decay"),
    ],
)
def test_typos_and_shorter_names_find_their_key(word, name):
    assert nearest(word, schema().keys) == f"; nearest: {name}"


def test_what_fits_a_screen_is_told_in_full():
    lines = [f"k{i}=1 (command line): there is no key k{i}" for i in range(38)]
    assert str(report(lines)).split("\n  ") == ["38 mistakes in the configuration:", *lines]


def test_every_kind_is_shown_and_the_others_are_counted():
    lines = [f"k{i}=1 (a.yml:{i}): there is no key k{i}; nearest: n{i}" for i in range(500)]
    head, *shown = str(report([*lines, "steps=x (command line): not an integer"])).split("\n  ")
    assert head == "501 mistakes in the configuration:"
    assert shown[-2:] == ["steps=x (command line): not an integer", f"and {500 - len(shown[:-2])} more"]
    assert shown[:-2] == lines[: len(shown) - 2]
    assert SCREEN_LINES - 3 <= rows("\n".join([head, *shown])) <= SCREEN_LINES


@pytest.mark.parametrize(
    "lines",
    [
        ["x" * 100_000],
        [f"{'x' * 100_000}{i}" for i in range(100)],
        [f"k{i}=1 (command line): {chr(97 + i % 26) * (i + 1)} {i}" for i in range(200)],
        ["k=1 (command line): " + "long " * 200 + str(i) for i in range(60)],
    ],
)
def test_no_message_is_longer_than_a_screen(lines):
    text = str(report(lines))
    assert rows(text) <= SCREEN_LINES
    assert len(lines) == 1 or text.endswith(" more")


def test_a_long_line_keeps_its_end():
    assert str(report([f"k=1: {'x' * 5000}; nearest: steps"])).endswith("; nearest: steps")


def test_only_the_mistakes_of_one_screen_get_a_suggestion(monkeypatch):
    seen = []
    monkeypatch.setattr("trainer.config.reader.nearest", lambda word, names: seen.append(word) or "; nearest: steps")
    for words in ([f"stepz_{i}=1" for i in range(900)], [f"--stepz_{chr(192 + i)}" for i in range(900)]):
        seen.clear()
        with pytest.raises(UserError) as caught:
            load(words)
        assert str(caught.value).count("; nearest: steps") > 30
        assert len(seen) == SCREEN_LINES


def test_a_command_line_of_many_mistakes_fits_a_screen():
    with pytest.raises(UserError) as caught:
        load([f"key_{i}={i}" for i in range(600)])
    assert rows(f"error: {caught.value}") <= SCREEN_LINES
