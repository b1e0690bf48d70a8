"""Settings that a run derives from its data if no key sets them."""

import json
import re
from types import SimpleNamespace

import pytest
from sample_data import config_of, say_nothing, write_records

from trainer import sft, train_compile
from trainer.chat import from_data
from trainer.chat.encoder import chat_encoder
from trainer.chat.pairs import pair_encoder
from trainer.config.capabilities.chat_keys import SFT_DEFAULTS
from trainer.config.capabilities.preference_keys import DPO_DEFAULTS
from trainer.config.capabilities.rl_keys import RL_DEFAULTS
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.data.dataset import open_dataset, text_encoder
from trainer.rl.prompts import open_prompts

CHATS = [{"messages": [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}]} for n in range(40)]
PROMPTS = [{"prompt": "a" * n} for n in range(1, 41)]
PAIRS = [{"chosen": "a" * n + "b", "rejected": "a" * n + "c"} for n in range(1, 41)]
OF = {"sft": SFT_DEFAULTS, "dpo": DPO_DEFAULTS, "grpo": RL_DEFAULTS | {"reward_functions": ["m:f"]}}


@pytest.fixture
def length(tmp_path, monkeypatch):
    """length(command, rows, *words): the max_target_length that a run of `command` derives from rows, and its
    message."""
    monkeypatch.chdir(tmp_path)
    model = SimpleNamespace(length=8192)
    monkeypatch.setattr("trainer.weights.open.open_source", lambda *given, **options: model)

    def taken_from(command, rows, *words, positions=8192):
        model.length = positions
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys = ["base.yml", "dataset_type=grain", "grain_file_type=jsonl", "grain_train_files=a.jsonl"]
        keys += ["tokenizer_type=bytes", "vocab_size=300", "load_parameters_path=model", "held_out_share=0"]
        loaded, lines = load([*keys, *words], defaults=OF[command]), []
        assert all(
            loaded.config[key] == value
            for key, value in from_data.taken(loaded, lines.append, sft.own_run, sft.positions).items()
        )
        return loaded.config.max_target_length, lines

    return taken_from


def longer(by):
    return [{"messages": [{"role": "user", "content": "a" * by}, CHATS[0]["messages"][1]]}]


def test_rows_have_room_for_the_longest_record(length):
    of_messages = "train_data_columns=messages"
    found, (line,) = length("sft", CHATS + longer(600), of_messages)
    assert (found, line.split(" ")[0]) == (640, "max_target_length=640")
    assert line.endswith("(not given): the longest of 41 conversations has 622 tokens")
    assert length("sft", CHATS, of_messages)[0] == 128
    assert length("sft", CHATS + longer(600), of_messages, "max_target_length=64") == (64, [])
    found, (line,) = length("dpo", [{"chosen": "b" * 200, "rejected": "c" * 100}], *[])
    assert (found, line.endswith("the longest of 1 pair has 302 tokens")) == (384, True), line
    found, (line,) = length("grpo", PROMPTS, "train_data_columns=prompt")
    said = "the longest of 40 prompts has 41 tokens, and 512 more are reserved for a completion"
    assert (found, line.endswith(said)) == (640, True)


def test_the_length_has_limits(length):
    of_messages = "train_data_columns=messages"
    found, (line,) = length("sft", longer(5000), of_messages)
    assert (found, line.endswith("more than the limit for a length from data")) == (2048, True), line
    found, (line,) = length("sft", longer(5000), of_messages, positions=1000)
    assert (found, line.endswith("more than the model's number of positions")) == (1000, True), line
    assert length("sft", longer(600), of_messages, positions=None)[0] == 640
    assert length("dpo", [{"chosen": "b" * 9000, "rejected": "c"}])[0] == 4096
    with pytest.raises(UserError, match=r"max_target_length=1000 \(the model and the data\)"):
        length("sft", longer(5000), of_messages, "batch_invariant=true", positions=1000)


def test_it_reads_a_bounded_part_of_the_data(length, monkeypatch):
    monkeypatch.setattr(from_data, "EXAMINED", 30)
    found, (line,) = length("sft", CHATS + longer(600), "train_data_columns=messages")
    assert (found, "the longest of the first 30 conversations has 51 tokens" in line) == (128, True), line


def test_a_run_that_continues_keeps_its_length(length, monkeypatch):
    asked = []
    own = (
        {"max_target_length": 256, "train_data_columns": ["messages"], "eval_data_columns": ["text"]},
        "checkpoints/3",
    )
    monkeypatch.setattr("trainer.weights.model_of_command.own_run", lambda config, path: asked.append(path) or own)
    words = "train_data_columns=messages", "run_name=x"
    found, (line,) = length("sft", longer(600), *words)
    assert (found, line) == (256, "max_target_length=256 (not given): as in checkpoints/3")
    _, (line,) = length("sft", longer(600), words[1], "eval_data_columns=text")
    said = "train_data_columns=[messages] max_target_length=256 (not given): as in checkpoints/3"
    assert line == said
    assert length("sft", longer(600), *words, "max_target_length=512") == (512, [])
    assert length("sft", longer(600), words[0])[0] == 640  # without run_name, the earlier run's keys are not used
    assert asked == ["model"] * 2


MESSAGES = {"messages": CHATS[0]["messages"]}
ANSWERS = {"chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("command", "row", "columns"),
    [
        ("sft", MESSAGES | {"text": "x"}, "messages"),
        ("sft", {"id": 1, "completion": "b", "prompt": "a", "tools": []}, "prompt,completion,tools"),
        ("dpo", ANSWERS | {"prompt": "a"}, "prompt,chosen,rejected"),
        ("grpo", {"answer": 3, "prompt": "a", "completions": "b"}, "prompt,answer"),
    ],
)
def test_the_usual_columns_are_taken_by_themselves(length, command, row, columns):
    _, (line, _) = length(command, [row])
    assert line == f"train_data_columns=[{columns}] (not given): the data have these columns"
    _, lines = length(command, [row], f"train_data_columns=[{columns}]", "max_target_length=128")
    assert lines == []


def test_other_columns_are_left_to_the_user(length):
    _, lines = length("dpo", [ANSWERS], "max_target_length=128")
    assert lines == []
    usual = "is not given, and the data have none of the usual columns: messages, or prompt and completion; set it to"
    with pytest.raises(UserError, match=f"train_data_columns {usual} some of: question"):
        length("sft", [{"question": "a"}])
    with pytest.raises(UserError, match="usual columns: prompt, or messages with use_chat_template=true; set it"):
        length("grpo", [MESSAGES])
    _, lines = length("grpo", [MESSAGES], "use_chat_template=true")
    assert lines[0].startswith("train_data_columns=[messages] (not given): ")


def test_a_compilation_asks_for_the_length(length, monkeypatch, capsys):
    monkeypatch.setattr("trainer.weights.model_of_command.with_model", lambda begun: load(words))
    words = ["base.yml", "use_sft=true", "load_parameters_path=model", "compile_topology=cpu-1", "tokenizer_type=bytes"]
    with pytest.raises(SystemExit) as ended:
        train_compile.main(words)
    assert ended.value.code == 2
    assert "max_target_length is not set: a run that starts from a model derives it from" in capsys.readouterr().err


def of_documents(encoder):
    return lambda config, say: open_dataset(config, say, encoder)


QUESTION = {"prompt": "a" * 600, "completion": "b", "chosen": "b", "rejected": "c"}
ALL = "all 7 {} are longer than max_target_length=128 (longest {}); give max_target_length="


@pytest.mark.parametrize(
    ("method", "columns", "opened", "said"),
    [
        ("use_sft", "prompt,completion", of_documents(chat_encoder), ALL.format("conversations", 622) + "640"),
        ("use_dpo", "prompt,chosen,rejected", of_documents(pair_encoder), ALL.format("pairs", "1,242") + "1280"),
        ("use_grpo", "prompt", open_prompts, "all 7 have more than 127 tokens (longest 601); give max_target_length="),
        (
            "",
            "prompt,completion",
            of_documents(text_encoder),
            "(longest 603); give max_target_length=640, fill the column",
        ),
    ],
)
@pytest.mark.parametrize("way", ["prepared", "streaming"])
def test_records_that_are_all_too_long_ask_for_a_length(tmp_path, method, columns, opened, said, way):
    write_records(tmp_path / "a.jsonl", "jsonl", [QUESTION] * 7)
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "tokenizer_type": "bytes", "packing": False}
    keys |= {"grain_train_files": tmp_path / "a.jsonl", "train_data_columns": f"[{columns}]", "data_pipeline": way}
    keys |= {"use_truncation": method != "use_dpo", "held_out_share": 0, "max_target_length": 128}
    keys |= {method: True, "eval_data_columns": f"[{columns}]"} if method else {}
    keys |= {"reward_functions": "[m:f]", "decode_sampling_temperature": 1} if method == "use_grpo" else {}
    config = resolve(config_of(tmp_path / "cache", **keys), device_count=1, platform="cpu")
    with pytest.raises(UserError, match=re.escape(said)):
        opened(config, say_nothing)
