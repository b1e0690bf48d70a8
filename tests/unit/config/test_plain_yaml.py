"""Limits of YAML: a small text cannot produce a large value or a long message, no matter where it is."""

import pytest

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.plain_yaml import MAX_LENGTH, Limit, read_text
from trainer.config.saved import read_saved

PARENT = "base_config: base.yml\n"


def levels(first: str, line: str, count: int = 8) -> str:
    """Returns `count` lines, each of which repeats the previous one ten times."""
    return first + "".join(line.format(i=i, ten=",".join([f"*x{i - 1}"] * 10)) for i in range(1, count))


LISTS = levels("x0: &x0 [a,a,a,a,a,a,a,a,a,a]\n", "x{i}: &x{i} [{ten}]\n")
MERGED = levels("x0: &x0 {steps: 1, vocab_size: 300}\n", "x{i}: &x{i}\n  <<: [{ten}]\n")
CHAIN = "x0: &x0 [a]\n" + "".join(f"x{i}: &x{i} [*x{i - 1}]\n" for i in range(1, 3000))
BOMBS = {
    LISTS + "logical_axis_rules: *x7\n": "more than 262144 characters once its aliases are expanded",
    LISTS + "run_name: *x7\n": "more than 262144 characters once its aliases are expanded",
    MERGED + "<<: *x7\n": "more than 262144 characters once its aliases are expanded",
    f"a: &a {'x' * 9000}\nb: [{'*a,' * 9000}]\n": "more than 262144 characters once its aliases are expanded",
    CHAIN: "nested deeper than 24",
    f"logical_axis_rules: {'[' * 20_000}{']' * 20_000}\n": "nested deeper than 24",
    f"logical_axis_rules: {'{a: ' * 20_000}\n": "nested deeper than 24",
    "logical_axis_rules: &a [*a]\n": "inside its own anchor",
    "x: &a\n  <<: *a\n": "inside its own anchor",
    f"prompt: {'x' * (1 << 20)}\n": "more than 262144 characters",
    f"prompt: {'x' * (1 << 21)}\n": "more than 262144 characters",
    f"{'k' * 5000}: 1\n": "not YAML",
    f"? [{'k,' * 5000}]\n: 1\n": "there is no key",
    f"base_config: {'x' * 5000}\n": "the name has 5000 bytes; the limit is 255",
    f"base_config: {'x/' * 5000}\n": "bytes; the limit is 4095",
    f"base_config: [{'x,' * 5000}]\n": "bytes",
    'base_config: "a\\0b"\n': "not a valid path",
    "base_config: ~nobody-of-that-name/x.yml\n": "there is no home folder ~nobody-of-that-name",
    "logical_axis_rules: [[!!timestamp x, fsdp]]\n": "not plain YAML (timestamp, line 2)",
    "logical_axis_rules: [[embed, 2001-99-99]]\n": "not plain YAML (timestamp, line 2)",
    "logical_axis_rules: [[embed, !!bool x]]\n": "not plain YAML (bool, line 2)",
    "logical_axis_rules: [[embed, !!binary x]]\n": "not plain YAML (binary, line 2)",
    "logical_axis_rules: [[!!python/object/apply:os.getcwd [], x]]\n": "not plain YAML",
    f"logical_axis_rules: [[embed, {'9' * 10_000}]]\n": "an integer with thousands of digits",
    "steps: !!timestamp x\n": "not plain YAML (timestamp, line 2)",
    "run_name: a\nprompt: 'x\a'\n": "my.yml: not YAML: ",
    f"steps: {'9' * 100_000}\n": "not an integer",
}


def message(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        load(argv)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("text", BOMBS, ids=range(len(BOMBS)))
def test_a_yml_beyond_a_limit_is_one_short_message(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yml").write_text(text if text.startswith("base_config") else PARENT + text)
    assert BOMBS[text] in message("my.yml")
    assert len(message("my.yml").splitlines()) == 2
    # A text that exceeds a limit may be valid YAML.
    assert ("not YAML" in message("my.yml")) == BOMBS[text].endswith(("not YAML", "not YAML: "))
    (tmp_path / "child.yml").write_text("base_config: my.yml\n")
    assert BOMBS[text] in message("child.yml")


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("logical_axis_rules=" + "[" * 60_000, "nested deeper than 24"),
        ("logical_axis_rules=" + "[" * 20_000 + "]" * 20_000, "nested deeper than 24"),
        ("logical_axis_rules=[&a [*a]]", "inside its own anchor"),
        ("logical_axis_rules=[[embed, 2001-01-01]]", "not plain YAML (timestamp"),
        (f"logical_axis_rules=[[{'x' * 9000}, fsdp]]", "there is no logical axis"),
        (f"logical_axis_rules=[[embed, {'x' * 9000}]]", "there is no mesh axis"),
        (f"logical_axis_rules=[{{a: {'x' * 9000}}}]", "is not a rule"),
        ("mlp_activations=" + "[a," * 3000, "nested deeper than 24"),
        ("x" * 5000, "not key=value"),
        ("x" * 5000 + ".yml", "the name has 5004 bytes"),
        (f"{'x' * 5000}=1", "there is no key"),
        (f"--steps={'9' * 5000}", "keys have no dashes"),
        (f"steps={'9' * 100_000}", "not an integer"),
    ],
)
def test_so_is_a_word_of_the_command_line(word, problem):
    assert problem in message(word)
    assert "YAML's flow form" not in message(word)


def test_a_merge_key_gives_what_the_table_itself_does_not(tmp_path):
    path = tmp_path / "my.yml"
    path.write_text(f"{PARENT}<<: {{steps: 1, vocab_size: 300}}\nsteps: 7\n")
    loaded = load([str(path)])
    assert (loaded.config.steps, loaded.config.vocab_size, loaded.warnings) == (7, 300, [])


def test_a_key_given_twice_in_a_file_is_told(tmp_path):
    path = tmp_path / "my.yml"
    path.write_text(f"{PARENT}steps: 1\nvocab_size: 300\nsteps: 2\nsteps: 3\n")
    loaded = load([str(path), "steps=4", "steps=5"])
    assert loaded.config.steps == 5
    assert loaded.warnings == [f"{path}:5: steps is given 3 times, first in line 2; the last one wins"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LISTS, "config.yml:6: more than 262144 characters"),
        ("steps: \a", "config.yml: not YAML: "),
        ("steps: [1", "config.yml:2: not YAML: "),
        ("[" * 20_000, "nested deeper than 24"),
        ("- steps", "not a mapping"),
        ("", "not a mapping"),
        ("steps: [1]\nhead_dim: 3e9\ndtype: !!timestamp x", "steps=[1]: a list instead of a single value"),
        ("steps: [1]\nhead_dim: nan\ndtype: !!timestamp x", "dtype=!!timestamp x: not plain YAML (timestamp, line 3)"),
        ("".join(f"{key}: x\n" for key in load([]).config if key != "run_name"), "and "),
    ],
)
def test_the_config_yml_of_a_folder_is_read_within_the_same_limits(text, problem):
    with pytest.raises(UserError) as caught:
        read_saved(text, "config.yml")
    assert str(caught.value).startswith("config.yml:")
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_a_saved_config_may_have_keys_that_are_gone():
    assert read_saved("steps: 3\nan_old_key: [1]\nmax_num_checkpoints_to_keep: null\n", "") == {
        "steps": 3,
        "max_num_checkpoints_to_keep": None,
    }


def test_no_more_of_a_file_is_read_than_the_limit_allows(tmp_path):
    """Bytes beyond the limit are not even decoded."""
    path = tmp_path / "large.yml"
    path.write_bytes(b"#" * 4 * MAX_LENGTH + b"\xff")
    with pytest.raises(Limit, match="more than 262144 characters"):
        read_text(path)
