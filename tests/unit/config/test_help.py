"""--help, --explain, and keys from the environment."""

import contextlib
import subprocess
import sys

import pytest

from trainer import export, parity, shardings, train, train_compile
from trainer.config.errors import UserError, command_line
from trainer.config.help import help_text, question
from trainer.config.load import load
from trainer.config.schema import schema
from trainer.config.sides import load_sides

SYNTHETIC = ("dataset_type=synthetic", "tokenizer_type=auto")


def answered(capsys, words, environment=None) -> str:
    with pytest.raises(SystemExit) as caught:
        load(words, environment=environment)
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("word", ["help", "--help", "-h"])
def test_help_lists_every_section_and_key(word, capsys):
    text = answered(capsys, ["base.yml", word])
    words = set(text.replace(",", " ").split())
    assert words >= set(schema().keys)
    assert all(f"\n\n{key.section}\n" in text for key in schema().keys.values())
    assert max(map(len, text.splitlines())) <= 116


def test_all_sections_hold_every_comment_once():
    text = help_text("all")
    assert all(text.count(f"\n{name}=") == 1 for name in schema().keys)
    assert "  Number of updates." in text
    assert "an integer in [1, 2147483647] or -1" in text


@pytest.mark.parametrize(
    ("asked", "section"),
    [("optimizer", "Optimizer"), ("opt", "Optimizer"), ("optimiser", "Optimizer"), ("run and output", "Run and output"),
     ("output", "Run and output"), ("check", "Checkpoints"), ("PARALLELISM", "Parallelism"), ("diloko", "DiLoCo")],
)  # fmt: skip
def test_one_section_by_its_beginning_a_word_or_something_similar(asked, section):
    text = help_text(asked)
    assert text.startswith(f"---- {section} ---")
    listed = {line.partition("=")[0] for line in text.splitlines() if line[:1].isalpha() and "=" in line}
    keys = {key.name for key in schema().keys.values() if key.section == section}
    assert keys <= listed
    assert not listed & (set(schema().keys) - keys)


def test_an_unknown_section_lists_those_there_are():
    with pytest.raises(UserError, match=r"--help zzz: there is no such section; the sections: Run and output, Check"):
        help_text("zzz")
    with pytest.raises(UserError, match="muon_beta is a key: --explain muon_beta"):
        help_text("muon_beta")


def test_where_the_question_ends():
    assert question(["base.yml", "steps=3"]) is None
    assert question(["base.yml", "--help", "run", "and", "output", "steps=3"]) == (
        "run and output",
        "",
        ["base.yml", "steps=3"],
    )
    assert question(["--help", "base.yml"]).section == ""
    assert question(["--help=data"]).section == "data"
    assert question(["a.yml", "--explain", "steps", "steps=3"]) == (None, "steps", ["a.yml", "steps=3"])
    assert question(["--explain=steps"]).key == "steps"
    assert question(["--explain", "steps=4"]) == (None, "steps", ["steps=4"])
    with pytest.raises(UserError, match="--explain needs the name of a key"):
        question(["--explain"])


def test_explain_says_the_value_and_where_it_comes_from(capsys, tmp_path):
    yml = tmp_path / "my.yml"
    yml.write_text("base_config: base.yml\nmodel_name: llama2-7b\nhead_dim: 64\n")
    for key, words, environment, value in (
        ("steps", [], {}, "steps=650, from: default"),
        ("base_emb_dim", ["model_name=llama2-7b"], {}, "base_emb_dim=4096, from: preset llama2-7b:"),
        ("base_emb_dim", ["global_parameter_scale=8"], {}, "base_emb_dim=384, from: default, x 2 by global_parameter"),
        ("head_dim", [str(yml)], {}, f"head_dim=64, from: {yml}:3"),
        ("head_dim", [str(yml), "head_dim=32"], {}, "head_dim=32, from: command line"),
        ("head_dim", [str(yml)], {"M_HEAD_DIM": "96"}, "head_dim=96, from: environment variable M_HEAD_DIM"),
        ("learning_rate", ["maxtext.yml", *SYNTHETIC], {}, "3.0e-05, from: maxtext.yml"),
    ):  # fmt: skip
        text = answered(capsys, [*words, "--explain", key], environment)
        assert text.startswith(f"{key}  (section {schema().keys[key].section})\n  ")
        assert f"\n  allowed: {schema().keys[key].allowed}\n  default: " in text
        assert f"\n  here: {value}" in text or f"{value}\n" in text
    text = answered(capsys, ["--explain", "muon_beta"])
    assert "no effect here: " in text
    assert "  Number of updates." in answered(capsys, ["--explain", "steps"])


def test_explain_of_a_key_whose_value_is_wrong_still_says_what_it_takes(capsys):
    with pytest.raises(UserError, match=r"steps=x \(command line\): not an integer"):
        load(["steps=x", "--explain", "steps"])
    assert "allowed: an integer in" in capsys.readouterr().out


def test_explain_of_other_keys(capsys):
    with pytest.raises(UserError, match="--explain step: there is no such key; nearest: steps"):
        load(["--explain", "step"])
    assert "renamed: MaxText computes it from base_emb_dim; write base_emb_dim" in answered(
        capsys, ["--explain", "emb_dim"]
    )


def test_explain_of_two_sides(capsys):
    with pytest.raises(SystemExit):
        load_sides(["left.steps=3", "--explain", "steps"], {"M_SEED": "1"})
    out = capsys.readouterr().out
    assert "here (left): steps=3, from: command line" in out
    assert "here (right): steps=650, from: default" in out


@pytest.mark.parametrize("module", [train, train_compile, shardings, parity, export])
def test_every_command_answers(module, capsys):
    for words, found in (
        (["--help"], "usage: "),
        (["--help", "loss"], "---- Loss"),
        (["--explain", "steps"], "default: 650"),
    ):
        with contextlib.suppress(SystemExit):
            module.main(words)
        assert found in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        module.main(["--help", "zzz"])
    assert caught.value.code == 2


@pytest.mark.parametrize("words", [["--help"], ["base.yml", "--explain", "steps"]])
def test_the_command_loads_nothing_that_takes_time(words):
    """This keeps the command below half a second of CPU time."""
    code = f"import sys; from trainer.train import main\ntry: main({words!r})\nexcept SystemExit: pass\n"
    code += "sys.exit([name for name in ('jax', 'flax', 'numpy', 'optax', 'orbax') if name in sys.modules] or 0)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# ---- M_KEY


def test_variables_are_words_of_the_command_line():
    environment = {
        "M_STEPS": "9",
        "M_MODEL_NAME": "llama2-7b",
        "M_MLP_ACTIVATIONS": "[gelu,linear]",
        "HOME": "x",
        "M_": "",
    }
    loaded = load(["learning_rate=1"], environment=environment)
    config = loaded.config
    assert (config.steps, config.base_emb_dim, config.mlp_activations) == (9, 4096, ["gelu", "linear"])
    assert loaded.changed["steps"] == "environment variable M_STEPS"
    assert load([]).config.steps == load([], environment={"PATH": "M_STEPS"}).config.steps == 650


def test_a_variable_and_the_command_line():
    same = load(["learning_rate=1e-3"], environment={"M_LEARNING_RATE": "0.001"})
    assert (same.config.learning_rate, same.changed["learning_rate"]) == (1e-3, "command line")
    with pytest.raises(
        UserError, match=r"steps=8 \(command line\) and M_STEPS=7 \(environment\): two values for one key"
    ):
        load(["steps=8"], environment={"M_STEPS": "7"})
    with pytest.raises(UserError, match=r"steps=x \(environment variable M_STEPS\): not an integer"):
        load([], environment={"M_STEPS": "x"})
    with pytest.raises(
        UserError, match=r"first_num_hash_layers=8 \(environment variable M_FIRST_NUM_HASH_LAYERS\): not supported yet"
    ):
        load([], environment={"M_FIRST_NUM_HASH_LAYERS": "8"})
    with pytest.raises(UserError, match=r"jax_cache_dir=a .* and M_JAX_CACHE_DIR=b"):
        load(["jax_cache_dir=a"], environment={"M_JAX_CACHE_DIR": "b"})
    assert load(["jax_cache_dir=a"], environment={"M_JAX_CACHE_DIR": "a"}).changed == {}


def test_a_variable_beats_a_yml_and_an_unknown_one_is_a_warning(tmp_path):
    yml = tmp_path / "my.yml"
    yml.write_text("base_config: base.yml\nsteps: 3\n")
    loaded = load([str(yml)], environment={"M_STEPS": "4", "M_STEPZ": "5"})
    assert loaded.config.steps == 4
    assert loaded.warnings == ["M_STEPZ in the environment is ignored: there is no key stepz; nearest: steps"]


def test_a_variable_that_is_almost_one_of_a_key_is_told():
    known = {"PORT": "80", "PROMPT": "$", "HOST": "h", "HOME": "/", "DTYPE": "x", "RUN_NAME": ""}
    assert load([], environment=known).warnings == []
    (line,) = load([], environment={"M_learning_rate": "3e-4"}).warnings
    assert line == "M_learning_rate in the environment is ignored: write it in capitals, M_LEARNING_RATE"
    bare = {"LEARNING_RATE": "1e-3", "STEPS": "9", "MODEL_NAME": "llama2-7b", "RUN_NAME": "r"}
    (line,) = load(["run_name=r"], environment={**known, **bare, "M_MODEL_NAME": "default"}).warnings
    assert line == (
        "not read from the environment: STEPS, LEARNING_RATE; the variable of a key begins with M_: M_STEPS"
    )


def test_a_key_given_twice_is_told(capsys):
    with pytest.raises(SystemExit):
        train.main(["steps=3", "lora.lora_rank=1", "learning_rate=1", "steps=x", "learning_rate=1", "lora_rank=2"])
    said = "warning: {} has no effect: a later argument overrides it, {}".format
    lines = [said("steps=3", "steps=x"), said("lora.lora_rank=1", "lora_rank=2")]
    assert capsys.readouterr().err.splitlines()[:2] == lines
    words = ["steps=3", "student_overrides.steps=1", "teacher_overrides.steps=2"]  # keys of different models
    assert command_line(words) == words
    assert not capsys.readouterr().err


def test_the_commands_read_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("M_STEPS", "7")
    for module in (train, train_compile, shardings, parity):
        with pytest.raises(SystemExit) as caught:
            module.main(["steps=8", "left.data_shuffle_seed=1"] if module in (shardings, parity) else ["steps=8"])
        assert caught.value.code == 2
        assert "M_STEPS=7 (environment)" in capsys.readouterr().err


def test_what_a_folder_may_say_is_told(capsys):
    asked, path = ["base.yml", "--explain", "vocab_size"], "load_parameters_path=absent"
    told = "the model at load_parameters_path=absent may have another value"
    assert told in answered(capsys, [*asked, path])
    for words in ([], [path, "vocab_size=300"], [path, "model_name=default"]):
        assert told not in answered(capsys, [*asked, *words])
