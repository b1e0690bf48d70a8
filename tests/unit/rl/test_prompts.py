"""The prompts of reinforcement learning, as a data set."""

from pathlib import Path

import numpy as np
import pytest
from sample_data import config_of, write_records

from trainer.config.errors import UserError
from trainer.config.resolve import resolve
from trainer.rl.prompts import INDEX, open_prompts
from trainer.rl.room import check_rows, rows_for

ALL = {"eval_interval": -1, "held_out_share": 0}
ROWS = [{"q": f"{i}+1=", "a": i, "more": {"k": [i]}} for i in range(20)]


def opened(tmp_path: Path, rows=ROWS, **keys):
    write_records(tmp_path / "prompts.jsonl", "jsonl", rows)
    base = {"use_grpo": True, "reward_functions": "[m:f]", "dataset_type": "grain", "grain_file_type": "jsonl"}
    base |= {"grain_train_files": tmp_path / "prompts.jsonl", "train_data_columns": "[q,a,more]"}
    base |= {"eval_data_columns": "[q,a,more]", "tokenizer_type": "bytes", "held_out_share": 0.25, "eval_interval": 5}
    config = config_of(tmp_path / "cache", **base | keys)
    lines: list[str] = []
    return open_prompts(resolve(config, device_count=1, platform="cpu"), lines.append), lines


def test_prompts_have_their_tokens_and_their_other_columns(tmp_path):
    dataset, lines = opened(tmp_path)
    assert lines == []
    assert dataset.held_out is not None
    assert dataset.train.size + dataset.held_out.size == 20
    for prompt in (*dataset.train.prompts, *dataset.held_out.prompts):
        i = prompt.columns["a"]
        assert prompt.text == f"{i}+1="
        assert prompt.columns == {"a": i, "more": {"k": [i]}}
        assert bytes(prompt.tokens[1:].tolist()).decode() == prompt.text
        assert prompt.tokens[0] == 256
        assert str(prompt.where).endswith(f"line {i + 1}")
    assert dataset.stop == [256]
    assert "prompts, " in str(dataset)


def test_every_prompt_comes_once_in_an_epoch_and_a_position_continues(tmp_path):
    dataset, _ = opened(tmp_path, **ALL)
    assert dataset.held_out is None
    stream = dataset.train_stream(rows=4)
    taken = [next(stream) for _ in range(10)]
    for epoch in (taken[:5], taken[5:]):
        assert sorted(np.concatenate([batch[INDEX] for batch, _ in epoch])) == list(range(20))
    again = dataset.train_stream(taken[6][1], rows=4)
    assert (next(again)[0][INDEX] == taken[7][0][INDEX]).all()
    other, _ = opened(tmp_path, ROWS[:-1], **ALL)
    with pytest.raises(UserError, match="the training documents"):
        other.train_stream(taken[6][1], rows=4)


def test_prompts_that_do_not_fit_are_left_out_and_counted(tmp_path):
    rows = [*ROWS, {"q": "", "a": 1, "more": 2}, {"q": "x" * 50, "a": 1, "more": 2}, {"q": None, "a": 1, "more": 2}]
    dataset, lines = opened(tmp_path, rows, **ALL, max_prefill_predict_length=20)
    assert dataset.train.size == 20
    assert len(lines) == 2
    assert "1 prompt with more than 20 tokens left out, the first in " in lines[0]
    assert "2 prompts without text left out" in lines[1]
    with pytest.raises(UserError, match="no prompt is left"):
        opened(tmp_path, **ALL, max_prefill_predict_length=3)


def test_a_template_makes_conversations_of_texts_and_of_messages(tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "0+1="}]
    rows = [{"q": "0+1=", "a": 1, "more": 2}, {"q": messages, "a": 1, "more": 2}]
    dataset, _ = opened(tmp_path, rows[:1], use_chat_template=True, max_target_length=64, **ALL)
    (text,) = dataset.train.prompts
    assert bytes(text.tokens[1:].tolist()).decode() == "User:\n0+1=\nAssistant:\n"
    dataset, _ = opened(tmp_path, rows[1:], use_chat_template=True, max_target_length=64, **ALL)
    (said,) = dataset.train.prompts
    assert said.text == messages
    assert bytes(said.tokens[1:].tolist()).decode().endswith("User:\n0+1=\nAssistant:\n")
    with pytest.raises(UserError, match="column q holds list, not text"):
        opened(tmp_path, rows[1:], **ALL)


@pytest.mark.parametrize(
    ("keys", "needed"),
    [
        ({}, 32),
        ({"max_prefill_predict_length": 100}, 32),
        ({"packing": False}, 32),
        ({"batch_invariant": True}, 32),
    ],
)
def test_an_update_has_rows_for_the_longest_completions(tmp_path, keys, needed):
    def config(**more):
        words = {"use_grpo": True, "reward_functions": "[m:f]", "batch_size": 8, "rl_num_generations": 4}
        words |= {"per_device_batch_size": 4, "max_target_length": 128} | keys | more
        return resolve(config_of(tmp_path, **words), device_count=1, platform="cpu")

    with pytest.raises(UserError, match=f"may need {needed} rows; an update has 28"):
        check_rows(config(gradient_accumulation_steps=7))
    enough = config(gradient_accumulation_steps=8)
    check_rows(enough)
    assert [rows_for(enough, n) for n in (1, 4, 5, 8, 9, 16, 17, 32)] == [4, 4, 8, 8, 16, 16, 32, 32]


MIXED = {"use_grpo": False, "reward_functions": [], "use_distill": True, "distill_rollouts": True} | ALL
MIXED |= {"distill_rollouts_share": 0.5, "train_data_columns": "[q,a]", "eval_data_columns": "[q,a]"}


@pytest.mark.parametrize("chat", [False, True])
def test_a_mixture_has_the_completions_of_the_data(tmp_path, chat):
    rows = [{"q": "2+1=", "a": "3"}, {"q": [{"role": "user", "content": "1+1="}] if chat else "1+1=", "a": "22"}]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    keys = MIXED | (
        {"use_chat_template": True, "chat_template": f"'{template}'", "max_target_length": 64} if chat else {}
    )
    dataset, _ = opened(tmp_path, rows, **keys)
    texts = [
        [bytes(min(token, 255) for token in part).decode("latin-1") for part in (one.tokens, one.completion)]
        for one in dataset.train.prompts
    ]
    if chat:
        assert [text for _, text in texts] == ["3</s>", "22</s>"]
        assert texts[1][0] == "<user>1+1=</s><assistant>"
    else:
        assert texts == [["\xff2+1=", "3\xff"], ["\xff1+1=", "22\xff"]]


@pytest.mark.parametrize("chat", [False, True])
def test_a_mixture_leaves_out_prompts_without_a_completion(tmp_path, chat):
    template = "'{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}'"
    keys = {"use_chat_template": True, "chat_template": template, "max_target_length": 64} if chat else {}
    dataset, lines = opened(tmp_path, [{"q": "2+1=", "a": ""}, {"q": "1+1=", "a": "2"}], **MIXED | keys)
    assert [one.text for one in dataset.train.prompts] == ["1+1="]
    assert ["1 prompt without completion left out" in line for line in lines] == [True]


def test_a_mixture_needs_completions(tmp_path):
    with pytest.raises(UserError, match="the rounds without rollouts need completions from the data"):
        opened(tmp_path, **MIXED | {"train_data_columns": "[q]", "eval_data_columns": "[q]"})
