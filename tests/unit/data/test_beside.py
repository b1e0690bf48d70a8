"""Files next to a tokenizer: special tokens, the beginning of a prompt, templates, and the files that a run keeps."""

import json
from pathlib import Path

import pytest

from trainer.config.errors import UserError
from trainer.data.chat_files import ChatTemplate, template_beside
from trainer.data.tokenizer import EOT_TEXT, train_bpe
from trainer.data.tokenizer_files import load_tokenizer

NAMES = ("<|begin|>", "<|end|>", "<|turn|>")


def made(folder: Path, config: dict | None = None, *, post_processor: str = "", **files: object) -> Path:
    """Writes a tokenizer.json with `NAMES`, `config` as tokenizer_config.json, and each of `files` as NAME.json."""
    import tokenizers
    from tokenizers import processors

    folder.mkdir(parents=True, exist_ok=True)
    inner = tokenizers.Tokenizer.from_str(train_bpe(["some text"], 270)._inner.to_str())
    inner.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in NAMES])
    if post_processor == "begin":
        token = (NAMES[0], inner.token_to_id(NAMES[0]))
        inner.post_processor = processors.TemplateProcessing(single=f"{NAMES[0]} $A", special_tokens=[token])
    elif post_processor == "bytes":
        inner.post_processor = processors.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def loaded(folder: Path):
    return load_tokenizer(str(folder), "auto", add_bos=True, add_eos=True)


# As in transformers 5.24 (`_from_pretrained`): special_tokens_map.json overrides tokenizer_config.json, unless the
# latter has added_tokens_decoder.
@pytest.mark.parametrize(
    ("config", "special", "end"),
    [
        ({"bos_token": NAMES[0]}, {"eos_token": NAMES[1]}, NAMES[1]),
        ({"eos_token": NAMES[1]}, {"eos_token": {"content": NAMES[2]}}, NAMES[2]),
        ({"eos_token": NAMES[1], "added_tokens_decoder": {}}, {"eos_token": NAMES[2]}, NAMES[1]),
        ({"eos_token": NAMES[1]}, {"pad_token": NAMES[2]}, NAMES[1]),
        (None, {"eos_token": NAMES[2]}, NAMES[2]),
    ],
)
def test_the_file_that_names_the_end_of_a_document(tmp_path, config, special, end):
    tokenizer = loaded(made(tmp_path, config, special_tokens_map=special))
    assert tokenizer.eos == tokenizer.special_tokens[end]
    assert tokenizer.special_names["eos_token"] == end


def test_the_special_tokens_of_a_sentencepiece_model(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some text and more text"] * 9),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        control_symbols="<|turn|>",
    )
    own = loaded(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|turn|>"}))
    tokenizer = loaded(tmp_path)
    assert (own.eos, tokenizer.eos) == (2, own.special_tokens["<|turn|>"])
    assert tokenizer.bos == own.bos == 1
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|absent|>"}))
    with pytest.raises(UserError, match=r"special_tokens_map.json names <\|absent\|>, which tokenizer.model lacks"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("config", "processor", "begins"),
    [
        ({"bos_token": NAMES[0], "eos_token": NAMES[1], "tokenizer_class": "A"}, "", False),
        ({"eos_token": NAMES[1], "tokenizer_class": "A"}, "", False),  # like Qwen's: the end also begins documents
        ({"bos_token": NAMES[0], "eos_token": NAMES[1], "tokenizer_class": "A", "add_bos_token": True}, "", True),
        ({"bos_token": NAMES[0], "eos_token": NAMES[1], "add_bos_token": False}, "", False),
        ({"bos_token": NAMES[0], "eos_token": NAMES[1], "add_bos_token": False}, "begin", True),
        ({"bos_token": NAMES[0], "eos_token": NAMES[1], "add_bos_token": True}, "bytes", False),
        ({"bos_token": NAMES[0], "eos_token": NAMES[1]}, "", False),
        ({"bos_token": EOT_TEXT, "eos_token": EOT_TEXT}, "", True),  # as this trainer wrote it
    ],
)
def test_a_prompt_begins_as_the_tokenizer_says_wherever_it_lies(tmp_path, config, processor, begins):
    folder = made(tmp_path / "published", config, post_processor=processor)
    (tmp_path / "kept").mkdir()
    tokenizer = loaded(folder)
    for name, data in tokenizer.saved_files().items():  # as stored by a run, an export and a quantized copy
        (tmp_path / "kept" / name).write_bytes(data)
    assert tokenizer.before_text == ([tokenizer.special_tokens[config["bos_token"]]] if begins else [])
    assert loaded(tmp_path / "kept").before_text == tokenizer.before_text
    assert load_tokenizer(str(folder), "auto", add_bos=False, add_eos=True).before_text == []


def test_a_trained_tokenizer_begins_prompts_with_its_token(tmp_path):
    tokenizer = train_bpe(["some text"], 270)
    tokenizer.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    assert loaded(tmp_path).before_text == tokenizer.before_text == [0]
    config.write_text(json.dumps({"bos_token": EOT_TEXT, "eos_token": EOT_TEXT}))  # as earlier versions wrote it
    assert loaded(tmp_path).before_text == [0]


def test_a_run_keeps_every_file_of_the_tokenizer_as_it_is(tmp_path):
    config = {"eos_token": NAMES[1], "padding_side": "left", "model_max_length": 8192, "tokenizer_class": "A"}
    folder = made(tmp_path, config, special_tokens_map={"eos_token": NAMES[1]}, vocab={}, added_tokens={"<|end|>": 271})
    (folder / "merges.txt").write_text("#version")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "unrelated.json").write_text("{}")
    tokenizer = loaded(folder)
    assert tokenizer.saved_files() == files
    tokenizer.chat_template = ChatTemplate("{{ another }}", "chat_template")
    kept = {name: data for name, data in files.items() if not name.startswith("additional")}
    assert tokenizer.saved_files() == kept | {"chat_template.jinja": b"{{ another }}"}
    tokenizer.chat_template = ChatTemplate("{{ another }}", "a file", "with tools")
    assert tokenizer.saved_files()["additional_chat_templates/tool_use.jinja"] == b"with tools"


def test_a_tokenizer_with_a_name_of_its_own_takes_no_other_vocabulary_along(tmp_path):
    made(tmp_path, {"eos_token": NAMES[1]})
    (tmp_path / "tokenizer.json").rename(tmp_path / "mine.json")
    (tmp_path / "tokenizer.json").write_text("another")
    kept = loaded(tmp_path / "mine.json").saved_files()
    assert kept.keys() == {"tokenizer.json", "tokenizer_config.json"}
    assert NAMES[1].encode() in kept["tokenizer.json"]


@pytest.mark.parametrize("form", ["folder", "config"])
def test_named_templates(tmp_path, form):
    if form == "folder":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("with tools")
        (tmp_path / "additional_chat_templates/rag.jinja").write_text("with documents")
        (tmp_path / "chat_template.jinja").write_text("without")
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "unread"}')
    else:
        named = [{"name": "default", "template": "without"}, {"name": "tool_use", "template": "with tools"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = template_beside(tmp_path)
    assert found is not None
    assert (found.text, found.with_tools) == ("without", "with tools")


def test_named_templates_without_a_default_one_are_refused(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("with tools")
    with pytest.raises(UserError, match="the templates tool_use, but none named default"):
        template_beside(tmp_path)
