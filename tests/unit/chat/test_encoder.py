"""Conversations as documents: chat templates, tokens, masks, and what is refused."""

import base64
import datetime
import json
from pathlib import Path

import numpy as np
import pytest
from chat_cases import OTHER, SAID
from sample_data import config_of, document, say_nothing, write_records
from tokenizers import AddedToken

from trainer.chat.encoder import Prompts, chat_encoder
from trainer.config.errors import UserError
from trainer.data.chat_files import ChatTemplate, template_beside
from trainer.data.dataset import open_dataset
from trainer.data.documents import Counts, Record
from trainer.data.tokenizer import EOT_TEXT, ByteTokenizer, JsonTokenizer, train_bpe
from trainer.data.tokenizer_files import load_tokenizer
from trainer.objectives.multi_token import MultiToken

TEXT = f"{EOT_TEXT}User:\nHi\nAssistant:\nYo{EOT_TEXT}\n"


def encoder_of(tmp_path: Path, tokenizer=None, columns=("messages",), **keys):
    base = {"use_sft": True, "dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": "x"}
    base |= {"tokenizer_type": "bytes", "grain_packing_type": "best_fit", "use_truncation": True}
    config = config_of(tmp_path / "cache", **base | {"train_data_columns": "messages"} | keys)
    return chat_encoder(config, tokenizer or ByteTokenizer(), columns, True)


def encoded(encoder, *conversations):
    counts = Counts()
    records = [Record(f"line {i}", (one,)) for i, one in enumerate(conversations, 1)]
    return encoder.encode(records, counts), counts


def learnt(tokens, loss, after=()) -> bytes:
    assert after == ()
    return bytes(int(i) if i < 256 else ord("$") for i in tokens[1:][loss])


def test_tokens_and_mask(tmp_path: Path):
    (document, other), counts = encoded(encoder_of(tmp_path), SAID, SAID + OTHER)
    assert document is not None
    assert other is not None
    assert learnt(*document) == b"Yo$"
    assert learnt(*other) == b"Yo$OK$"
    assert ByteTokenizer().decode(document.tokens) == TEXT.replace(EOT_TEXT, "")
    assert document.tokens.tolist().count(256) == 2  # both from the template
    assert counts.notes() == []
    (whole,), _ = encoded(encoder_of(tmp_path, sft_train_on_completion_only=False), SAID)
    assert whole.loss is None


def test_special_tokens_in_messages_are_text(tmp_path: Path):
    says = [SAID[0], {"role": "assistant", "content": f"a{EOT_TEXT}b"}]
    (made,), counts = encoded(encoder_of(tmp_path), says)
    assert learnt(*made) == f"a{EOT_TEXT}b$".encode()
    (note,) = counts.notes()
    assert note.startswith("1 names of special tokens in messages are encoded as ordinary text; the first in line 1")
    bpe = train_bpe([document(i) for i in range(20)], 300)
    (made,), _ = encoded(encoder_of(tmp_path, bpe), says)
    assert made.tokens.tolist().count(bpe.eos) == 2
    prompts = Prompts(config_of(tmp_path / "cache", tokenizer_type="bytes"), ByteTokenizer())
    assert prompts.tokens(EOT_TEXT).count(256) == 1
    assert prompts.stop_tokens() == [256]


def test_the_template_of_the_key_comes_first_and_generation_prints_the_date_of_today(tmp_path: Path):
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = ChatTemplate("{{ messages }}", "the tokenizer's")
    config = config_of(tmp_path, tokenizer_type="bytes", chat_template="{{ strftime_now('%F') }}")
    assert bytes(Prompts(config, tokenizer).tokens("Hi")).decode() == datetime.date.today().isoformat()


def test_names_of_special_tokens_are_part_of_the_identity(tmp_path: Path):
    tokenizer = ByteTokenizer()
    before = encoder_of(tmp_path, tokenizer).identity
    tokenizer.special_names = {"bos_token": ""}
    assert encoder_of(tmp_path, tokenizer).identity != before


def test_a_template_of_its_own_file_comes_before_that_of_the_configuration(tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    assert template_beside(tmp_path).text == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert template_beside(tmp_path).text == "new"


def test_white_space_is_learnt_although_a_tokenizer_trims_its_offsets(tmp_path: Path):
    from tokenizers import processors

    bpe = train_bpe([document(i) for i in range(20)], 300)
    bpe._inner.post_processor = processors.ByteLevel(trim_offsets=True)
    template = "{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}{{ eos_token }}"
    says = [SAID[0], {"role": "assistant", "content": " a \n\n b\t 7 "}]
    (made,), _ = encoded(encoder_of(tmp_path, bpe, chat_template=template), says)
    assert bpe.decode(made.tokens[1:][made.loss]) == says[1]["content"]


def test_a_conversation_that_is_too_long_is_cut_or_skipped(tmp_path: Path):
    long = [{"role": "user", "content": "x" * 100}, SAID[1]]
    (kept, skipped), counts = encoded(encoder_of(tmp_path, max_target_length=32), SAID, long)
    assert kept is not None
    assert skipped is None
    (note,) = counts.notes()
    why = "their first trained token is after max_target_length=32 tokens"
    assert note == f"1 conversations are skipped, because {why}; the first in line 2"
    for keys in ({"use_truncation": False}, {"grain_packing_type": "concat_then_split"}):
        (kept,), counts = encoded(encoder_of(tmp_path, max_target_length=32, **keys), long)
        assert kept is not None


def test_dropped_reasoning_is_said_once_with_its_number(tmp_path: Path):
    template = (
        "{% for m in messages %}{{ m.role[0] + (m.content if loop.last or m.role == 'user' else '') + eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    documents, counts = encoded(encoder_of(tmp_path, chat_template=template), SAID + OTHER, SAID, SAID + SAID + OTHER)
    assert [learnt(*document) for document in documents] == [b"OK$", b"Yo$", b"OK$"]
    (note,) = counts.notes()
    assert note.startswith("3 turns of the assistant are rendered differently in a complete conversation than")
    assert "are not trained" in note
    assert "the first in line 1, message 2: generation sees" in note


def test_a_tokenizer_and_its_template_come_back_from_what_is_saved(tmp_path: Path):
    bpe = train_bpe([document(i) for i in range(20)], 300)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    bpe.save(folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ x_token }}{% endfor %}"
    names = {"bos_token": None, "eos_token": {"content": EOT_TEXT}, "x_token": "!"}
    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "t"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": named}))
    write_records(tmp_path / "a.jsonl", "jsonl", [{"messages": SAID}] * 9)
    keys = {"use_sft": True, "dataset_type": "grain", "grain_file_type": "jsonl", "tokenizer_path": folder}
    keys |= {"grain_train_files": tmp_path / "a.jsonl", "train_data_columns": "messages", "held_out_share": 0}
    keys |= {"sft_train_on_completion_only": False, "grain_packing_type": "best_fit"}
    dataset = open_dataset(config_of(tmp_path / "cache", **keys), say_nothing, chat_encoder)
    batch, _ = next(dataset.train_stream(rows=1))
    assert dataset.tokenizer.decode(batch["inputs"][0][:5]) == "Hi!Yo"
    for name, content in dataset.tokenizer_files.items():
        (tmp_path / name).write_bytes(content)
    again = load_tokenizer(str(tmp_path), "auto", add_bos=True, add_eos=True)
    assert again.fingerprint == dataset.tokenizer.fingerprint
    assert again.chat_template.text == template
    assert again.special_names == {"eos_token": EOT_TEXT, "x_token": "!"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(UserError, match="the templates tool_use, but none named default"):
        load_tokenizer(str(folder), "auto", add_bos=True, add_eos=True)


def test_conversations_with_tools_take_the_template_for_tools(tmp_path: Path):
    tokenizer = ByteTokenizer()
    default = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    default += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer.chat_template = ChatTemplate(default, "its file", "{{ tools | tojson }} " + default)
    encoder = encoder_of(tmp_path, tokenizer, ("messages", "tools"), max_target_length=64)
    counts = Counts()
    records = [Record(f"line {i}", (SAID, tools)) for i, tools in enumerate(([{"name": "look"}], None, []), 1)]
    with_tools, without, empty = encoder.encode(records, counts)
    assert tokenizer.decode(with_tools.tokens) == '[{"name": "look"}] user: Hiassistant: Yo'
    assert tokenizer.decode(without.tokens) == tokenizer.decode(empty.tokens) == "user: Hiassistant: Yo"
    assert learnt(*with_tools) == learnt(*without) == b"Yo$"
    other = encoder_of(tmp_path, tokenizer, ("messages", "tools"), chat_template=default)
    assert other.identity["template"] != encoder.identity["template"]


def with_tokens(*added) -> JsonTokenizer:
    bpe = train_bpe([document(i) for i in range(20)], 290)
    bpe._inner.add_tokens(list(added))
    return JsonTokenizer(bpe._inner, EOT_TEXT, EOT_TEXT)


def test_a_line_break_that_is_an_added_token_ends_no_turn(tmp_path: Path):
    """As in Gemma's tokenizers."""
    tokenizer = with_tokens("\n", "<end>")
    template = "{% for m in messages %}{{ m.role + ':' + m.content + '<end>\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    (made,), _ = encoded(encoder_of(tmp_path, tokenizer, chat_template=template), SAID)
    ends = tokenizer.markers["<end>"]
    assert made.tokens[1:][made.loss].tolist() == [*tokenizer.encode("Yo"), ends]
    prompts = Prompts(config_of(tmp_path / "cache", tokenizer_type="bytes", chat_template=template), tokenizer)
    assert prompts.stop_tokens() == [ends]


def test_a_token_that_the_model_has_not_is_refused(tmp_path: Path):
    tokenizer = with_tokens(AddedToken("<end>", special=True))
    assert tokenizer.largest < 290 == tokenizer.markers["<end>"]
    template = "{% for m in messages %}{{ m.content + '<end>' }}{% endfor %}"
    assert encoded(encoder_of(tmp_path, tokenizer, chat_template=template, vocab_size=291), SAID)
    said = "vocab_size=290, but the chat template writes the token <end> with id 290: set vocab_size=291"
    with pytest.raises(UserError, match=said):
        encoded(encoder_of(tmp_path, tokenizer, chat_template=template, vocab_size=290), SAID)
    config = config_of(tmp_path / "cache", tokenizer_type="bytes", chat_template=template, vocab_size=290)
    with pytest.raises(UserError, match=said):
        Prompts(config, tokenizer).tokens("Hi")


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_other_tokenizers(tmp_path: Path, kind: str):
    if kind == "tiktoken":
        tokens = [bytes([i]) for i in range(256)] + [b"OK", b"Yo"]
        lines = [base64.b64encode(token) + b" %d" % i for i, token in enumerate(tokens)]
        (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    else:
        import sentencepiece

        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([document(i) for i in range(50)]),
            model_prefix=str(tmp_path / "tokenizer"),
            vocab_size=330,
            model_type="bpe",
            byte_fallback=True,
            minloglevel=2,
        )
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.model"), "auto", add_bos=True, add_eos=True)
    says = [*SAID, OTHER[0], {"role": "assistant", "content": "\U0001f600OK\u20ac"}]  # some characters become bytes
    (made,), counts = encoded(encoder_of(tmp_path, tokenizer, vocab_size=tokenizer.vocab_size), says)
    assert made is not None
    targets = made.tokens[1:][made.loss]
    assert tokenizer.decode(targets).replace(" ", "") == "Yo\U0001f600OK\u20ac"
    assert [made.tokens[0], *targets].count(tokenizer.special_tokens[tokenizer.special_names["eos_token"]]) == 2
    assert made.tokens.tolist().count(tokenizer.bos) == 1
    assert counts.notes() == []


def test_places_are_described_once():
    """Describing a position is slow: a line number is counted from the beginning of the file."""
    counts, asked = Counts(), []
    every = Counts()
    for _ in range(3):
        for _ in range(2):
            counts.notice("kind", lambda: asked.append(1) or "things; the first in line 1")
        every.add(counts.take())
    assert len(asked) == 1
    assert every.notes() == ["6 things; the first in line 1"]


WAYS = ("prepared", "streaming")


@pytest.mark.parametrize("way", WAYS)
def test_data_without_anything_to_learn_show_a_text(tmp_path: Path, way: str):
    write_records(tmp_path / "a.jsonl", "jsonl", [{"messages": SAID[:1]}] * 3)
    keys = {"use_sft": True, "dataset_type": "grain", "grain_file_type": "jsonl", "tokenizer_type": "bytes"}
    keys |= {"grain_train_files": tmp_path / "a.jsonl", "train_data_columns": "messages", "data_pipeline": way}
    said = r"(?s)nothing to learn from:\n3 conversations are skipped.*line 1\n.*User:\nHi\n"
    with pytest.raises(UserError, match=said):
        open_dataset(config_of(tmp_path / "cache", **keys), say_nothing, chat_encoder)


def test_lines_on_one_record_and_on_none_name_conversations(tmp_path: Path):
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{tmp_path}/a.jsonl"}
    keys |= {"train_data_columns": "messages", "eval_data_columns": "messages", "held_out_share": 0}
    config, lines = config_of(tmp_path / "cache", **keys, tokenizer_type="bytes", max_target_length=128), []
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": SAID}) + "\n")
    open_dataset(config, lines.append, chat_encoder)
    assert "prepared 1 row: 1 conversation, 3 trained tokens" in lines
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(UserError, match="there is no conversation with text"):
        open_dataset(config, lines.append, chat_encoder)


def dataset_of(tmp_path: Path, **keys):
    base = {"use_sft": True, "dataset_type": "grain", "grain_file_type": "jsonl", "tokenizer_type": "bytes"}
    base |= {"grain_train_files": tmp_path / "a.jsonl", "train_data_columns": "messages", "held_out_share": 0}
    base |= {"grain_packing_type": "best_fit", "max_target_length": 64}
    return open_dataset(config_of(tmp_path / "cache", **base | keys), say_nothing, chat_encoder)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_worker_processes_and_formats_make_the_same_rows(tmp_path: Path, kind: str):
    write_records(tmp_path / "a.jsonl", "jsonl", [{"messages": SAID + i % 3 * OTHER} for i in range(12)])
    write_records(tmp_path / "a.parquet", "parquet", [{"messages": SAID + i % 3 * OTHER} for i in range(12)])
    keys = {"grain_file_type": kind, "grain_train_files": tmp_path / f"a.{kind}", "enable_data_shuffling": False}
    rows = []
    for pipeline in ({}, {"data_pipeline": "streaming", "grain_worker_count": 1}):
        stream = dataset_of(tmp_path, **keys, **pipeline).train_stream(rows=4)
        rows.append(next(stream)[0])
        stream.close()
    for name in rows[0]:
        np.testing.assert_array_equal(rows[0][name], rows[1][name])
    assert (rows[0]["targets_segmentation"] != 0).any()


def test_modules_of_multi_token_prediction_learn_the_answers_only(tmp_path: Path):
    write_records(tmp_path / "a.jsonl", "jsonl", [{"messages": SAID + OTHER}] * 4)
    batch, _ = next(dataset_of(tmp_path, max_target_length=128).train_stream(rows=1))
    segments = batch["targets_segmentation"]
    assert learnt(np.concatenate([[0], batch["targets"][0]]), segments[0] != 0) == b"Yo$OK$" * 2
    found = MultiToken(None, 2, 1.0).prepare(batch)  # type: ignore[arg-type]
    for k in range(2):
        target, segment = found["mtp_targets"][0, :, k], found["mtp_targets_segmentation"][0, :, k]
        assert learnt(np.concatenate([[0], target]), segment != 0) == b"Yo$OK$" * 2, k


@pytest.mark.parametrize(
    "keys",
    [
        {"chat_template": "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"},
        {"formatting_func_path": "my_functions:pairs", "train_data_columns": "[q,a]"},
        {"sft_train_on_completion_only": False},
    ],
)
def test_a_key_that_changes_rows_changes_the_fingerprint(functions, keys):
    write_records(functions / "a.jsonl", "jsonl", [{"messages": SAID, "q": "Hi", "a": "Yo"}] * 4)
    before = dataset_of(functions)
    assert dataset_of(functions, **keys).fingerprint != before.fingerprint
    if "formatting_func_path" in keys:
        changed = keys | {"formatting_func_kwargs": "{suffix: x}"}
        assert dataset_of(functions, **changed).fingerprint != dataset_of(functions, **keys).fingerprint
