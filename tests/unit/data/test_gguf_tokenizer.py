"""The tokenizer of a GGUF file returns the same tokens as llama.cpp, and as the tokenizer.json that it was made
from."""

import json

import numpy as np
import pytest
from gguf_cases import EXPECTED, KINDS, OF_PIECES, differs, digest, texts, tokenizer_folder

from trainer.config.errors import UserError
from trainer.data.gguf_tokenizer import OWN, begins, tokenizer_files
from trainer.data.tokenizer_files import load_tokenizer
from trainer.leaves.about import About
from trainer.leaves.gguf_file import GgufHeader
from trainer.models.gguf_words import WORDS, words_of
from trainer.weights.gguf.tokenizer import tokenizer_values


def values_of(kind, folder):
    rows = tokenizer_folder(kind, folder)
    return tokenizer_values(folder, About(), rows + 3)


def header(values, path):
    return GgufHeader(path, values | {f"{OWN}token_type": np.array(values[f"{OWN}token_type"], np.int32)}, {}, 0)


def written(values, folder):
    folder.mkdir()
    for name, data in tokenizer_files(header(values, folder)).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_llama_cpp(kind, tmp_path):
    """Compares 200 texts in ten scripts."""
    values = values_of(kind, tmp_path)
    again = written(values, tmp_path / "again")
    theirs, ours = (load_tokenizer(str(it), "auto", add_bos=True, add_eos=True) for it in (tmp_path, again))
    rows = ours.encode_many(texts())
    assert [list(row) for row in rows] == [list(row) for row in theirs.encode_many(texts())]
    with np.load(EXPECTED) as golden:
        other = digest(rows) != golden[f"tokens/{kind}"]
    same = [not differs(kind, text) for text in texts()]
    assert not other[same].any()
    assert other.sum() == {"tekken": 7, "gpt-4o": 6, "llama4": 6, "qwen2": 42}.get(kind, 0)
    assert (ours.bos, ours.eos, ours.before_text) == (1, 2, [1] if kind in OF_PIECES else [])
    plain = next(text for text, is_same in zip(texts(), same, strict=True) if is_same)
    assert ours.decode(ours.encode(plain)) == plain
    assert ours.vocab_size == theirs.vocab_size == len(values[f"{OWN}tokens"]) - 3


def test_every_name_of_words_means_one_way():
    for name, words in WORDS.items():
        spec = {"pre_tokenizer": words.pre_tokenizer, "normalizer": words.normalizer}
        spec["model"] = {"ignore_merges": words.whole}
        assert WORDS[words_of(spec)] == words, name
    assert words_of(spec | {"normalizer": {"type": "Lowercase"}}) is None
    assert words_of({"pre_tokenizer": None, "model": {}}) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre": "jais-2"}, "tokenizer.ggml.pre=jais-2 is not known"),
        ({"pre": None}, "tokenizer.ggml.pre=(none) is not known"),
        ({"add_space_prefix": True}, "adds a space before texts"),
        ({"model": "bert"}, "tokenizer.ggml.model=bert: tokenizers of this kind are not supported"),
        ({"tokens": []}, "has no tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "two equal tokens"),
        ({"bos_token_id": 5000}, "bos_token_id=5000, but the file has 903 tokens"),
        ({"bos_token_id": "x"}, "bos_token_id is not an integer"),
        ({"token_type": [1]}, "not one type for each token"),
    ],
)
def test_what_is_not_known_is_refused(changes, named, tmp_path):
    values = values_of("smollm", tmp_path) | {f"{OWN}{name}": value for name, value in changes.items()}
    values = {name: value for name, value in values.items() if value is not None}
    with pytest.raises(UserError) as error:
        tokenizer_files(header(values, tmp_path))
    assert named in str(error.value)


def test_a_text_begins_as_the_kind_of_tokenizer_does(tmp_path):
    values = {f"{OWN}model": "gpt2", f"{OWN}pre": "llama-bpe"}
    assert begins(GgufHeader(tmp_path, values, {}, 0))
    assert not begins(GgufHeader(tmp_path, values | {f"{OWN}pre": "qwen2"}, {}, 0))
    assert not begins(GgufHeader(tmp_path, values | {f"{OWN}add_bos_token": False}, {}, 0))
    assert begins(GgufHeader(tmp_path, {f"{OWN}model": "llama"}, {}, 0))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "splits texts into words in an unsupported way"),
        ({"normalizer": {"type": "NFKC"}}, "splits texts into words in an unsupported way"),
        ({"decoder": None}, "format=gguf writes byte-level BPE"),
    ],
)
def test_a_tokenizer_that_llama_cpp_has_not_is_refused(changes, named, tmp_path):
    tokenizer_folder("gpt-2", tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=named):
        tokenizer_values(tmp_path, About(), 900)


def test_merges_that_do_not_follow_from_scores_are_refused(tmp_path):
    tokenizer_folder("llama", tmp_path)
    file = tmp_path / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["model"]["merges"] = spec["model"]["merges"][:-1]
    file.write_text(json.dumps(spec))
    with pytest.raises(UserError, match="cannot be derived from scores"):
        tokenizer_values(tmp_path, About(), 900)


def test_at_most_three_tokens_end_a_text(tmp_path):
    tokenizer_folder("gpt-2", tmp_path)
    said = []
    values = tokenizer_values(tmp_path, About({}, {"eos_token_id": [3, 0, 1, 9]}), 900, said.append)
    names = ("eos", "eot", "eom")
    assert [values[f"{OWN}{name}_token_id"] for name in names] == [2, 3, 0]
    assert said == ["a GGUF file can store only [2, 3, 0] of the tokens that end a text, [2, 3, 0, 1, 9]"]
