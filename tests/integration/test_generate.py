"""`python -m trainer.generate` with a run, with exported weights and with prompts in a file."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys

import jax
import pytest
from compiler import xla_flags
from process_cases import LAUNCHER
from run_cases import RUN, train
from support import pinned

from trainer import export, generate

pytestmark = pytest.mark.usefixtures("equal_programs")
PROMPT = "def f(x):"
FLAGS = [f"{flag}={value}" for flag, value in pinned("nnx").items()]
TEXT = {
    "dataset_type": "grain",
    "tokenizer_type": "bytes",
    "vocab_size": 257,
    "max_target_length": 20,
    "steps": 12,
    "learning_rate_schedule_steps": 12,
    "eval_interval": -1,
    "checkpoint_period": 12,
    "dropout_rate": 0.0,
    "ema_decay": 0.5,
    "logits_via_embedding": False,
    "grain_file_type": "text",
}
DRAWN = ["decode_sampling_temperature=1.5", "decode_sampling_seed=3", "max_target_length=20"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few updates on bytes, with greedy samples, and its output."""
    folder = tmp_path_factory.mktemp("generate")
    text = "def f(x):\n    return x + 1\n" * 3000
    (folder / "corpus.txt").write_text(text)
    words = ["grain_train_files=corpus.txt", f"prompt={PROMPT}", "decode_sampling_strategy=greedy"]
    code, printed = train(folder, *words, **TEXT)
    assert code == 0, printed
    return folder / RUN, printed


def run_command(monkeypatch, *words, stdin=""):
    """Returns the command's exit code, standard output and standard error on one device."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    found = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: found)
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            generate.main(list(map(str, words)))
        except SystemExit as exit_:
            code = exit_.code
    return code, output.getvalue(), errors.getvalue()


def test_the_text_of_a_run_is_its_own_sample(run, monkeypatch):
    """Like the sample, the command uses averaged parameters by default; raw parameters generate another text."""
    path, printed = run
    code, text, said = run_command(monkeypatch, path, f"prompt={PROMPT}", "decode_sampling_strategy=greedy")
    assert code == 0
    assert text.startswith(PROMPT)
    assert text.strip() in printed.replace("\r", "")
    assert re.search(r"\d+ tokens; ready after .* s, the first token .* s later, \d+ tokens/s after that", said)
    short = ["decode_sampling_strategy=greedy", "weights=raw", "max_target_length=20"]
    assert run_command(monkeypatch, path, f"prompt={PROMPT}", *short)[1].startswith(PROMPT)


def test_prompts_come_out_in_their_order_and_as_if_each_were_alone(run, monkeypatch, tmp_path):
    path, _ = run
    prompts = ["def f", "return x +", "x\f", "    ret"]
    alone = run_command(monkeypatch, path, f"prompt={prompts[1]}", *DRAWN)[1]
    given = "\n".join(["", *prompts, ""])
    # With probabilities, it has the programs of JSON lines.
    code, text, _ = run_command(monkeypatch, path, "prompts=-", *DRAWN, "return_log_prob=true", stdin=given)
    assert code == 0
    before, found, after = text.partition(alone)
    assert found
    assert before.startswith(prompts[0])
    assert all(prompt in after for prompt in prompts[2:])
    file = tmp_path / "prompts.txt"
    file.write_text(given)
    # There are fewer slots than prompts.
    assert run_command(monkeypatch, path, f"prompts={file}", *DRAWN, "per_device_batch_size=1")[1] == text


def test_lines_of_json_keep_texts_with_newlines_apart(run, monkeypatch, tmp_path):
    path, _ = run
    prompts = [PROMPT, "return", "x + 1", "x"]
    given = "\ufeff" + "\n".join(prompts)
    plain = run_command(monkeypatch, path, "prompts=-", *DRAWN, "return_log_prob=true", stdin=given)[1]
    file = tmp_path / "prompts.txt"
    file.write_text(given, encoding="utf-8")
    code, text, said = run_command(monkeypatch, path, f"prompts={file}", "format=jsonl", *DRAWN)
    assert code == 0, said
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    assert "".join(row["prompt"] + row["text"] + "\n" for row in rows) == plain
    for row in rows:
        assert list(row) == ["prompt", "text", "tokens", "log_probs", "end"]
        assert bytes(token for token in row["tokens"] if token < 256).decode(errors="replace") == row["text"]
        assert len(row["log_probs"]) == len(row["tokens"])
        assert all(log_prob <= 0 for log_prob in row["log_probs"])
        assert row["end"] == ("length" if len(row["prompt"]) + 1 + len(row["tokens"]) == 20 else "stop")


def test_a_chat_template_is_told(run, monkeypatch, tmp_path):
    from trainer.data.tokenizer import train_bpe

    train_bpe(["def f(x):"], 257).save(tmp_path)
    words = [f"tokenizer_path={tmp_path}", "tokenizer_type=auto", f"prompt={PROMPT}"]
    # In the first folder the prompt is too long, which is reported before a model is loaded.
    for name, content, keys, code in (
        ("chat_template.jinja", "{{ x }}", ["max_prefill_predict_length=1"], 2),
        ("tokenizer_config.json", '{"chat_template": "{{ x }}"}', [], 0),
    ):
        (tmp_path / name).write_text(content)
        ended, text, said = run_command(monkeypatch, run[0], *words, *keys)
        assert ended == code, said
        assert f"{tmp_path / name} has a chat template, which is not applied" in said
        (tmp_path / name).unlink()
    assert text.startswith(PROMPT)


@pytest.mark.rest(covered_by="unit/inference/test_goldens.py")
def test_a_hugging_face_directory_and_a_command_line_of_maxtext_give_the_same_text(run, monkeypatch, tmp_path):
    path, _ = run
    greedy = ["decode_sampling_strategy=greedy", "max_target_length=20", f"prompt={PROMPT}"]
    expected = run_command(monkeypatch, path, "weights=raw", *greedy)[1]
    out = tmp_path / "hf"
    with contextlib.redirect_stdout(io.StringIO()):
        export.main([str(path), str(out), "format=hf"])
    assert run_command(monkeypatch, out, "tokenizer_type=bytes", *greedy)[1] == expected
    # An end-of-text token: the third token of the continuation.
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [ord(expected[len(PROMPT) + 2])]}))
    assert run_command(monkeypatch, out, "tokenizer_type=bytes", *greedy)[1] in (
        expected[: len(PROMPT) + i] + "\n" for i in range(3)
    )
    keys = json.loads((out / "config.json").read_text())
    sizes = [
        f"base_emb_dim={keys['hidden_size']}",
        f"base_mlp_dim={keys['intermediate_size']}",
        f"base_num_decoder_layers={keys['num_hidden_layers']}",
        f"base_num_query_heads={keys['num_attention_heads']}",
        f"base_num_kv_heads={keys['num_key_value_heads']}",
        f"head_dim={keys['head_dim']}",
        "vocab_size=257",
        f"logits_via_embedding={keys['tie_word_embeddings']}",
        *FLAGS,
    ]
    code, text, said = run_command(
        monkeypatch, "base.yml", f"load_parameters_path={path}", "tokenizer_type=bytes", *sizes, *greedy
    )
    assert code == 0, said
    assert text == expected


@pytest.mark.rest(covered_by="generation in one process; integration/test_processes.py")
def test_two_processes_print_one_text(run, monkeypatch, tmp_path):
    """ici_data_parallelism=2 fits both processes, but not the one device on which a checkpoint's keys are compared."""
    path, _ = run
    (tmp_path / "prompts.txt").write_text("def f\nx\n")
    words = [path, f"prompts={tmp_path / 'prompts.txt'}", "decode_sampling_strategy=greedy", "max_target_length=20"]
    expected = run_command(monkeypatch, *words)[1]
    command = [sys.executable, LAUNCHER, "-n", "2", "--devices", "1", "--all", "--module", "trainer.generate"]
    done = subprocess.run(
        [*command, "--", *map(str, words), "ici_data_parallelism=2", *FLAGS],
        env=os.environ | {"XLA_FLAGS": xla_flags(1)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    # Gloo, which connects processes on CPUs, writes its own lines to standard output.
    text = re.sub(r"(\[\d\] )?\[Gloo\].*\n", "", done.stdout)
    assert text.replace("[0] ", "") == expected
    assert done.stderr.count("the first token") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is no model"),
        (["no/such/folder"], "there is no such folder"),
        (["RUN", "weights=x"], "weights=x: allowed: raw, ema"),
        (["RUN", "format=json"], "format=json: allowed: text, jsonl"),
        (["RUN", "prompt="], "prompt is empty"),
        (["RUN", "prompts=no/such/file"], "prompts=no/such/file: cannot be read"),
        (["RUN", "prompts=-"], "contains no prompt"),
        (["RUN", "prompts=-", "prompt=x"], "prompt and prompts: give one of them"),
        (["RUN", "max_target_length=8"], "has 10 tokens, at most 7"),
        (["RUN", "max_prefill_predict_length=4"], "has 10 tokens, at most 4"),
        (["RUN", "base_emb_dim=64"], "different model"),
        (["RUN", "decode_sampling_strategy=topk"], "needs the number of tokens"),
        (["RUN", "decode_sampling_strategy=nucleus"], "needs the probability of the nucleus"),
        (["RUN", "decode_sampling_strategi=topk"], "nearest: decode_sampling_strategy"),
        (["base.yml", "dataset_type=synthetic", "tokenizer_type=bytes", *FLAGS], "there is no model"),
    ],
)
def test_a_mistake_is_one_message_and_code_2(run, monkeypatch, words, said):
    words = [run[0] if word == "RUN" else word for word in words]
    if "prompt" not in str(words[1:]) and len(words) > 1:
        words.append(f"prompt={PROMPT}")
    code, text, errors = run_command(monkeypatch, *words)
    assert code == 2
    assert said in errors
    assert "Traceback" not in errors
    assert text == ""


def test_help_says_what_the_command_takes(monkeypatch):
    code, text, _ = run_command(monkeypatch, "--help")
    assert code == 0
    assert "python -m trainer.generate FROM" in text
    assert "decode_sampling_nucleus_p" in run_command(monkeypatch, "--help", "Generation")[1]
