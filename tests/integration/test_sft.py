"""`python -m trainer.sft` as a user runs it, and `trainer.generate` after it."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from run_cases import command
from support import TINY, pinned

from trainer import generate, sft
from trainer.checkpoint.manager import newest
from trainer.observe.metrics import METRICS_FILE, read_rows

pytestmark = pytest.mark.usefixtures("equal_programs")
MODEL = TINY | pinned("nnx") | {"vocab_size": 300, "max_target_length": 64, "enable_checkpointing": True}
MODEL |= {"enable_tensorboard": False, "dataset_type": "grain", "grain_file_type": "jsonl", "tokenizer_type": "bytes"}
CHATS = MODEL | {"grain_train_files": "chats.jsonl", "train_data_columns": "messages", "steps": 40, "prompt": "color?"}
CHATS |= {"eval_data_columns": "messages", "held_out_share": 0.2, "eval_interval": 20, "learning_rate": 0.01}
START = {"load_parameters_path": "runs/base", "run_name": "chats", "tokenizer_type": "auto"}
COLORS = ("red", "blue", "green")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a run on text, and the output of a fine-tuning run that starts from it."""
    folder = tmp_path_factory.mktemp("sft")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"color {i}?"},
                {"role": "assistant", "content": COLORS[i % 3]},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for i in range(60)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"text": f"color {i} is {COLORS[i % 3]}. " * 3} for i in range(60)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        code, said = command(MODEL | {"grain_train_files": "texts.jsonl", "run_name": "base", "steps": 3, "prompt": ""})
        assert code == 0, said
        code, printed = command(CHATS | START, program=sft.main)
        assert code == 0, printed
    return folder, printed


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder[0])


def evaluations(run: str) -> list[float]:
    return [row["eval_loss"] for row in read_rows(Path("runs", run, METRICS_FILE)) if "eval_loss" in row]


def test_it_learns_the_answers_with_the_tokenizer_of_its_model(folder):
    _, printed = folder
    first, last = evaluations("chats")
    assert last < first < 3
    assert "runs/base/checkpoints/3/run/tokenizer: the tokenizer of the model, because none is given" in printed
    assert re.search(r"---- sample, continues 'color\?' ----\ncolor\?\n[^\n]{0,9}\n---- end of sample ----", printed)
    saved = {path.name: path.read_text() for path in (newest(Path("runs/chats")) / "run/tokenizer").iterdir()}
    assert "{% generation %}" in saved["chat_template.jinja"]


def test_it_resumes_and_the_other_command_does_not():
    words = CHATS | START | {"steps": 45, "learning_rate_schedule_steps": 40}
    code, said = command(words)
    assert code == 2
    assert "python -m trainer.sft trains on conversations (use_sft=true)" in said
    code, said = command({**words, "use_sft": True})
    assert code == 2
    assert "python -m trainer.sft" in said
    code, said = command(words | {"chat_template": "{{ messages }}"}, program=sft.main)
    assert code == 2
    code, said = command(words, program=sft.main)
    assert code == 0, said
    assert "checkpoints/40: 40 of 45 updates are done" in said
    assert [row["step"] for row in read_rows(Path("runs/chats", METRICS_FILE)) if "loss" in row] == [*range(45)]


def test_generation_applies_the_template_and_ends_with_the_turn(monkeypatch):
    found = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: found)
    output, errors = io.StringIO(), io.StringIO()
    words = ["runs/chats", "prompt=color 7?", "use_chat_template=true", "decode_sampling_strategy=greedy"]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        generate.main(words)
    asked, answer = output.getvalue().rstrip("\n").split("\n")
    assert asked == "color 7?"
    assert answer in COLORS or set(answer) <= set("redblugn")
    assert "chat template: runs/chats/checkpoints/" in errors.getvalue()


def test_what_it_shows_and_that_this_loads_no_jax():
    words = [f"{key}={value}" for key, value in CHATS.items()]
    code = "import sys; from trainer.sft import main; main(sys.argv[1:]); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words, "--show", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = (
        "---- chats.jsonl, line 1: 60 tokens, 8 learnt\n<|endoftext|>User:\ncolor 0?\nAssistant:\n«red<|endoftext|>»\n"
    )
    assert done.stdout == f"{shown}User:\nSure?\nAssistant:\n«yes<|endoftext|>»\n\n\nFalse\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"dataset_type": "synthetic"}, "dataset_type=synthetic has no conversations; use grain, hf or tfds"),
        ({"grain_file_type": "text"}, "grain_file_type=text has no conversations"),
        ({"tokenize_train_data": False}, "tokenize_train_data=false: conversations are text"),
        ({"use_sft": False}, "use_sft=false: trainer.sft is for supervised fine-tuning"),
        ({"tokenizer_type": "auto"}, "a tokenizer is not trained on conversations"),
        ({"train_data_columns": "[a,b,c]"}, "must be one column of messages, or two"),
        ({"chat_template": "x", "chat_template_path": "y"}, "give only one of them"),
        ({"chat_template": "chat.jinja"}, "this is not a template; give a template's file with chat_template_path"),
        ({"chat_template_path": "gone.jinja"}, "there is no such file"),
        ({"formatting_func_path": "f"}, "not the path of a function, package.module:function"),
        ({"train_data_columns": "gone"}, "there is no column gone"),
        ({"max_target_length": 16}, "conversations are longer than max_target_length=16 (longest 63); give "),
        ({"--show": "x"}, "--show needs a number of records"),
    ],
)
def test_what_is_refused(words, said):
    code, printed = command(CHATS | {"enable_checkpointing": False} | words, program=sft.main)
    assert code == 2
    assert said in printed
