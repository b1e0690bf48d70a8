"""Tokenizers: tokenizers that the trainer trains, and users' own tokenizers."""

import base64
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from sample_data import config_of, document, opened

from trainer.config.errors import UserError
from trainer.data.prepare import open_tokenizer
from trainer.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, train_bpe
from trainer.data.tokenizer_files import load_tokenizer

TEXTS = ["", "def f(x):\r\n\treturn 'ä€😀\x00'\n", "  <|endoftext|> </s> is text here"]
BOTH = {"add_bos": True, "add_eos": True}


@pytest.fixture(scope="module")
def bpe() -> JsonTokenizer:
    return train_bpe([document(i) for i in range(50)], 300)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of ranks: every byte, and a few merges."""
    tokens = [bytes([i]) for i in range(256)] + [b"do", b"cu", b"docu", b" d"]
    path = tmp_path_factory.mktemp("ranks") / "tokenizer.model"  # the name of Llama 3's own file
    path.write_bytes(b"\n".join(base64.b64encode(token) + b" %d" % i for i, token in enumerate(tokens)) + b"\n")
    return path


@pytest.fixture(scope="module")
def piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import sentencepiece

    folder = tmp_path_factory.mktemp("piece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([document(i) for i in range(50)]),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def assert_reads_back(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir()
    tokenizer.save(folder)
    again = load_tokenizer(str(folder), "auto", add_bos=tokenizer.bos is not None, add_eos=tokenizer.eos is not None)
    for same in (again, pickle.loads(pickle.dumps(again))) if isinstance(again, JsonTokenizer) else (again,):
        assert_equal(same, tokenizer)


def assert_equal(again: Tokenizer, tokenizer: Tokenizer) -> None:
    assert type(again) is type(tokenizer)
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.vocab_size, again.bos, again.eos) == (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos)
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)


def assert_exact_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.bytes_per_token is not None
    assert tokenizer.bytes_per_token.shape == (tokenizer.vocab_size,)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        special = [i for i in (tokenizer.bos, tokenizer.eos) if i is not None]
        assert tokenizer.decode([*special, *ids, *special]) == text
        assert tokenizer.bytes_per_token[ids].sum() == len(text.encode())
        assert not set(special) & set(ids)
        assert [list(part) for part in tokenizer.encode_many([text, text])] == [ids, ids]
    assert tokenizer.bytes_per_token[special].tolist() == [0] * len(special)


def test_the_trained_bpe(bpe: JsonTokenizer, tmp_path: Path):
    assert bpe.vocab_size == 300
    assert bpe.bos == bpe.eos == 0
    assert_exact_bytes(bpe)
    assert_reads_back(bpe, tmp_path / "saved")
    again = train_bpe([document(i) for i in range(50)], 300)
    assert again.fingerprint == bpe.fingerprint
    assert train_bpe([document(i) for i in range(49)], 300).fingerprint != bpe.fingerprint


def test_bytes(tmp_path: Path):
    tokenizer = load_tokenizer("", "bytes", **BOTH)
    assert isinstance(tokenizer, ByteTokenizer)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (257, 256, 256)
    assert tokenizer.encode("ä") == [0xC3, 0xA4]
    assert_exact_bytes(tokenizer)
    assert_reads_back(tokenizer, tmp_path / "saved")


def test_tiktoken(ranks: Path, tmp_path: Path):
    tokenizer = load_tokenizer(str(ranks), "auto", **BOTH)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (260 + 256, 260, 261)
    assert tokenizer.encode("docu") == [258]
    assert_exact_bytes(tokenizer)
    assert_reads_back(tokenizer, tmp_path / "saved")
    lines = ranks.read_bytes().splitlines()
    for data, message in (
        ([*lines[:3], b"x"], "line 4, is not base64"),
        (lines[:-2] + lines[-1:], "the ranks are not 0 to 258"),
    ):
        (tmp_path / "bad.tiktoken").write_bytes(b"\n".join(data))
        with pytest.raises(UserError, match=message):
            load_tokenizer(str(tmp_path / "bad.tiktoken"), "tiktoken", **BOTH)


def test_sentencepiece(piece: Path, tmp_path: Path):
    tokenizer = load_tokenizer(str(piece), "auto", **BOTH)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (330, 1, 2)
    assert tokenizer.bytes_per_token is None
    text = document(5).strip()  # stripped, because this model strips it, too
    ids = tokenizer.encode(text)
    assert tokenizer.decode([1, *ids, 2]) == text
    assert 1 not in tokenizer.encode("<s> is text")
    assert tokenizer.encode_many([text, text]) == [ids, ids]
    assert_reads_back(tokenizer, tmp_path / "saved")
    for bad in (b"\x00 no model", piece.read_bytes().replace(b"<unk>", b"<\xffnk>")):
        (tmp_path / "bad.model").write_bytes(bad)
        with pytest.raises(UserError, match=r"bad.model is not a sentencepiece model"):
            load_tokenizer(str(tmp_path / "bad.model"), "sentencepiece", **BOTH)


def json_tokenizer(folder: Path, special: list[str], normalizer=None, config: dict | None = None) -> str:
    """Returns a folder with a small tokenizer.json that has these special tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.add_special_tokens(special)
    inner.add_tokens(["<plain>"])
    inner.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_special_tokens_of_a_tokenizer_json(tmp_path: Path):
    llama = json_tokenizer(tmp_path / "llama", ["<|begin_of_text|>", "<|end_of_text|>"])
    tokenizer = load_tokenizer(llama, "huggingface", **BOTH)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size) == (256, 257, 259)
    assert_exact_bytes(tokenizer)
    assert_reads_back(tokenizer, tmp_path / "saved")
    assert tokenizer.bytes_per_token is not None
    assert tokenizer.bytes_per_token[258] == len("<plain>")
    bare = load_tokenizer(llama, "huggingface", add_bos=False, add_eos=False)
    assert (bare.bos, bare.eos) == (None, None)
    gpt2 = load_tokenizer(json_tokenizer(tmp_path / "gpt2", ["<|endoftext|>"]), "auto", **BOTH)
    assert gpt2.bos == gpt2.eos == 256
    config = {"bos_token": None, "eos_token": {"content": "<end>"}}
    named = load_tokenizer(json_tokenizer(tmp_path / "named", ["</s>", "<end>"], config=config), "auto", **BOTH)
    assert named.bos == named.eos == 257


def test_a_tokenizer_that_changes_text_counts_no_bytes(tmp_path: Path):
    from tokenizers import normalizers

    path = json_tokenizer(tmp_path / "nfc", ["</s>"], normalizers.NFC())
    tokenizer = load_tokenizer(path, "auto", **BOTH)
    assert tokenizer.bytes_per_token is None
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("\u00e4")] == [b"\xc3", b"\xa4"]


def test_a_tokenizer_that_drops_merges_at_random_does_not(tmp_path: Path):
    from tokenizers import Tokenizer

    train_bpe([document(i) for i in range(20)], 300).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    text, wanted = document(1), load_tokenizer(str(tmp_path), "auto", **BOTH)
    spec = json.loads(file.read_text())
    spec["model"]["dropout"] = 0.5
    file.write_text(json.dumps(spec))
    assert len({tuple(Tokenizer.from_file(str(file)).encode(text).ids) for _ in range(20)}) > 1
    tokenizer = load_tokenizer(str(tmp_path), "auto", **BOTH)
    assert tokenizer.fingerprint == wanted.fingerprint
    again = pickle.loads(pickle.dumps(tokenizer))
    for each in (tokenizer, again):
        assert {tuple(each.encode(text)) for _ in range(20)} == {tuple(wanted.encode(text))}
        assert each.note == f"{file}: its dropout=0.5 is turned off, so that equal texts have equal tokens"
    lines: list[str] = []
    config = config_of(tmp_path, tokenizer_type="auto", tokenizer_path=tmp_path)
    open_tokenizer(config, [], [], tmp_path, lines.append)
    assert lines == [tokenizer.note]
    assert json.loads(tokenizer.saved_files()["tokenizer.json"]) == spec  # an export contains the file unchanged


def test_where_the_package_itself_fails(tmp_path: Path):
    """The package then raises a BaseException."""
    spec = json.loads(Path(json_tokenizer(tmp_path / "made", ["</s>"]), "tokenizer.json").read_text())
    steps = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    charsmap = {"type": "Precompiled", "precompiled_charsmap": ""}
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": []}
    for field, value, message in (
        ("normalizer", charsmap, "precompiled_charsmap is damaged"),
        ("post_processor", template | {"special_tokens": {}}, "is not a tokenizer.json (no entry found for key)"),
        ("pre_tokenizer", steps, "cannot encode the text 'aaa.* (.*retry-limit-in-match over); a tokenizer without"),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {field: value}))
        with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
            load_tokenizer(str(tmp_path), "auto", **BOTH).encode_many(["a" * 40 + "b"] * 2)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 12, "4,096 times as long"),
        ([{"type": "Replace", "pattern": {"Regex": ""}, "content": "aaaa"}] * 9, "4,096 times as long"),
        ([{"type": "Prepend", "prepend": "a" * 1000}] * 9, "adds 9,000 characters, more than 4,096"),
        ([{"type": "Prepend", "prepend": "a"}] * 2000, "2,000 normalizers, more than 64"),
        ([{"type": "Precompiled", "precompiled_charsmap": "/////w=="}], "precompiled_charsmap is damaged"),
        ([{"type": "Replace", "pattern": {"String": "``"}, "content": '"'}, {"type": "NFKD"}] * 2, ""),
    ],
)
def test_a_normalizer_that_makes_texts_long_is_refused(tmp_path: Path, steps, message: str):
    path = json_tokenizer(tmp_path / "made", ["</s>"])
    file = Path(path, "tokenizer.json")
    spec = json.loads(file.read_text()) | {"normalizer": {"type": "Sequence", "normalizers": steps}}
    file.write_text(json.dumps(spec))
    if not message:
        assert load_tokenizer(path, "auto", **BOTH).encode("a``") == [ord("a") - 33, ord('"') - 33]
        return
    with pytest.raises(UserError, match=f"tokenizer.json: it.*{message}"):
        load_tokenizer(path, "auto", **BOTH)


def test_what_is_no_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"no known special token .* add_bos=false"):
        load_tokenizer(json_tokenizer(tmp_path / "none", []), "auto", **BOTH)
    config = {"bos_token": "<x>", "eos_token": "</s>"}
    with pytest.raises(UserError, match=r"special_tokens_map.json names <x>, which tokenizer.json lacks"):
        load_tokenizer(json_tokenizer(tmp_path / "wrong", ["</s>"], config=config), "auto", **BOTH)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad.json is not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "bad.json"), "auto", **BOTH)
    with pytest.raises(UserError, match=r"there is no such file"):
        load_tokenizer(str(tmp_path / "none.json"), "auto", **BOTH)
    with pytest.raises(UserError, match=r"contains no tokenizer.json or tokenizer.model"):
        load_tokenizer(str(tmp_path), "auto", **BOTH)


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece"])
@pytest.mark.parametrize("others", [[], ["known"]])
def test_text_that_a_tokenizer_without_an_unknown_token_cannot_encode(tmp_path: Path, kind: str, others: list[str]):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["known", "</s>"]
    inner = Tokenizer(getattr(models, kind)({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["</s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path), "auto", **BOTH)
    assert tokenizer.encode("known") == [0]
    with pytest.raises(UserError, match=r"cannot encode the text 'known else'"):
        tokenizer.encode_many([*others, "known else"])


@pytest.mark.parametrize("package", ["sentencepiece", "tiktoken"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs {package}: pip install 'trainer\[tokenizers\]'"):
        load_tokenizer(str(tmp_path / "tokenizer.model"), package, **BOTH)


@pytest.mark.parametrize("way", ["prepared", "streaming"])
def test_every_tokenizer_trains(corpora, piece: Path, ranks: Path, bpe: JsonTokenizer, tmp_path: Path, way: str):
    bpe.save(tmp_path)
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{corpora('jsonl')}/*"}
    keys |= {"data_pipeline": way, "held_out_share": 0, "enable_data_shuffling": False, "vocab_size": 600}
    for path in (piece, ranks, tmp_path / "tokenizer.json"):
        dataset = opened(tmp_path / "cache", **keys, tokenizer_path=path)
        stream = dataset.train_stream(rows=2)
        batch, _ = next(stream)
        stream.close()
        tokenizer = dataset.tokenizer
        assert tokenizer is not None
        targets = batch["targets"][0][batch["targets_segmentation"][0] == 1].tolist()
        assert document(0).startswith(tokenizer.decode(targets)[:10])
        assert batch["inputs"][0][0] == tokenizer.bos


def test_a_chat_template_is_told_only_if_columns_are_joined(bpe: JsonTokenizer, tmp_path: Path):
    bpe.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ x }}")
    for columns, told in (("[prompt,completion]", True), ("[text]", False)):
        lines: list[str] = []
        keys = {"train_data_columns": columns, "eval_data_columns": columns, "tokenizer_path": tmp_path}
        open_tokenizer(config_of(tmp_path, tokenizer_type="auto", **keys), [], [], tmp_path, lines.append)
        assert any("has a chat template, which is not applied" in line for line in lines) == told


def test_a_vocabulary_that_is_too_small_is_found_at_once(corpora, piece: Path, tmp_path: Path):
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{corpora('jsonl')}/*"}
    with pytest.raises(UserError, match=r"vocab_size=300, but the tokenizer .* has 330 tokens; set vocab_size=330"):
        opened(tmp_path, **keys, tokenizer_path=piece)
    with pytest.raises(UserError, match=r"the tokenizer bytes has 257 tokens"):
        opened(tmp_path, **keys, tokenizer_type="bytes", vocab_size=256)
    assert not list(tmp_path.iterdir())


def test_special_tokens_that_no_document_gets_need_no_rows(tmp_path: Path):
    """As in Gemma 3's tokenizer: the id of its image token is equal to the text models' number of embedding rows."""
    train_bpe(["def f(x)"], 257).save(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for special, largest in ((True, 256), (False, 257)):
        spec["added_tokens"] = [*spec["added_tokens"][:1], {"id": 257, "content": "<img>", "special": special, **flags}]
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        tokenizer = load_tokenizer(str(tmp_path), "auto", add_bos=True, add_eos=True)
        assert (tokenizer.vocab_size, tokenizer.largest) == (258, largest)
        assert max(tokenizer.encode("x<img>x")) <= largest


def test_token_tables_are_of_all_ids(bpe: JsonTokenizer):
    assert bpe.bytes_per_token is not None
    assert bpe.bytes_per_token.dtype == np.int32
    assert sorted(bpe.bytes_per_token)[1] == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "not a JSON object"),
        ("[" * 100_000, "nested deeper"),
        ('{"bos_token": 3}', "bos_token=3, neither text"),
        ('{"eos_token": {"contents": "x"}, "bos_token": [1]}', r"bos_token=\[1\], neither text"),
        ('{"bos_token": {"content": {}}}', "neither text nor an object with content"),
    ],
)
def test_a_tokenizer_config_of_other_types(tmp_path, config, message):
    train_bpe(["a text"], 300).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(tmp_path), "auto", add_bos=True, add_eos=True)


@pytest.mark.parametrize("vocabulary", [{}, {"a": 1 << 31}])
def test_a_tokenizer_without_tokens_or_with_huge_ids(tmp_path, vocabulary):
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(UserError, match="it has no tokens, or token ids of 16777216 or more"):
        load_tokenizer(str(tmp_path), "auto", add_bos=False, add_eos=False)
