"""What --show prints for records that are cut or skipped."""

import json

import pytest
from sample_data import config_of

from trainer.chat import show as chat_show
from trainer.config.capabilities.chat_keys import SFT_DEFAULTS
from trainer.config.capabilities.preference_keys import DPO_DEFAULTS


@pytest.fixture
def shown(tmp_path, capsys):
    """shown(show, row, **keys): the output for a row, and the notes after it."""

    def printed(show, row, **keys):
        (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
        given = dict(SFT_DEFAULTS if show is chat_show.conversations else DPO_DEFAULTS)
        given |= {"dataset_type": "grain", "grain_file_type": "jsonl", "tokenizer_type": "bytes", "held_out_share": 0}
        given |= {"grain_train_files": tmp_path / "a.jsonl"} | keys
        given = {key: f"[{','.join(it)}]" if isinstance(it, list) else it for key, it in given.items()}
        lines = []
        show(config_of(tmp_path / "cache", **given), 1, lines.append)
        return capsys.readouterr().out, lines[1:]

    return printed


def test_a_pair_that_is_cut_shows_what_is_learnt(shown):
    pair = {"prompt": "p" * 40, "chosen": "c" * 300, "rejected": "r" * 20}
    columns = ["prompt", "chosen", "rejected"]
    text, notes = shown(chat_show.pairs, pair, train_data_columns=columns, max_target_length=64)
    assert text.splitlines()[0].endswith("line 1: 64 of the 64 tokens of a row")
    assert "chosen: 361 tokens, 328 of them cut, 17 learnt\n" in text
    assert f"«{'c' * 17}»[285 tokens cut]\n" in text
    assert f"«{'r' * 17}»[5 tokens cut]\n" in text
    assert notes == ["1 of 1 pairs are too long and lose 376 tokens (use_truncation=true)"]
    keys = {"train_data_columns": columns, "max_target_length": 64, "use_truncation": False}
    text, notes = shown(chat_show.pairs, pair, **keys)
    assert text.splitlines()[0].endswith("line 1: skipped")
    assert "chosen: 361 tokens, 0 learnt\n" in text
    assert "«" not in text


def test_a_conversation_that_is_cut_shows_what_is_learnt(shown):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 100}]}
    text, _ = shown(chat_show.conversations, chat, train_data_columns=["messages"], max_target_length=64)
    assert "line 1: 122 tokens, 57 of them cut, 45 learnt\n" in text
    assert f"«{'b' * 45}»[57 tokens cut]" in text
    text, _ = shown(chat_show.conversations, chat, train_data_columns=["messages"], max_target_length=16)
    assert "line 1: skipped; 122 tokens, 0 learnt\n" in text
    assert "«" not in text
