"""Pairs of answers as documents: columns, trained tokens, and what is cut, skipped and refused."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from trainer.chat.pairs import pair_encoder
from trainer.config.capabilities.preference_keys import DPO_DEFAULTS
from trainer.config.dump import as_words
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.data.documents import Counts, Record
from trainer.data.tokenizer import ByteTokenizer, JsonTokenizer

KEYS = {"dataset_type": "grain", "grain_train_files": "x", "tokenizer_type": "bytes", "eval_interval": -1}
KEYS |= {"vocab_size": 300, "max_target_length": 128}
PLAIN = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def encoder_of(columns="prompt chosen rejected", tokenizer=None, **keys):
    names = columns.split()
    keys = KEYS | {"train_data_columns": names, "eval_data_columns": names} | keys
    config = load(as_words(keys), defaults=DPO_DEFAULTS).config
    return pair_encoder(config, tokenizer or ByteTokenizer(), tuple(names), True)


def encoded(encoder, *records):
    counts = Counts()
    documents = encoder.encode([Record(f"line {i}", one) for i, one in enumerate(records, 1)], counts)
    return documents, counts


def text(document, only_learnt=False):
    """Returns the sequences of a pair as text, with $ for the special token. `only_learnt`: only the trained tokens."""
    parts = (document, *document.after)
    kept = [part.tokens[1:][part.loss] if only_learnt else part.tokens for part in parts]
    return ["".join(chr(i) if i < 256 else "$" for i in tokens) for tokens in kept]


def said(role, content):
    return {"role": role, "content": content}


def test_a_prompt_and_two_texts_are_a_conversation():
    (document,), counts = encoded(encoder_of(), ("Hi", "Yo", "No!"))
    assert text(document) == ["$User:\nHi\nAssistant:\nYo$\n", "$User:\nHi\nAssistant:\nNo!$\n"]
    assert text(document, only_learnt=True) == ["Yo$", "No!$"]
    assert (counts.documents, counts.notes()) == (1, [])


def test_forms_of_the_same_pair():
    question, yes, no = said("user", "Hi"), said("assistant", "Yo"), said("assistant", "No!")
    (expected,), _ = encoded(encoder_of(), ("Hi", "Yo", "No!"))
    for columns, record in (
        ("chosen rejected", ([question, yes], [question, no])),
        ("chosen rejected", (json.dumps([question, yes]), json.dumps([question, no]))),
        ("chosen rejected", ({"role": ["user", "assistant"], "content": ["Hi", "Yo"]}, [question, no])),
        ("prompt chosen rejected", ("Hi", [question, yes], [question, no])),  # as in UltraFeedback
        ("prompt chosen rejected", ([question], [yes], [no])),
        ("prompt chosen rejected", ([question], "Yo", [no])),
        ("prompt chosen rejected", (json.dumps([question]), [yes], [no])),
        ("question better worse", ("Hi", "Yo", "No!")),
        ("prompt chosen rejected tools", ("Hi", "Yo", "No!", [])),
    ):
        (document,), _ = encoded(encoder_of(columns), record)
        assert text(document) == text(expected), columns
        assert text(document, only_learnt=True) == text(expected, only_learnt=True)


@pytest.mark.parametrize("template", ["", PLAIN], ids=["marked", "rendered"])
def test_only_turns_after_the_common_ones_are_learnt(template):
    common = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    chosen = [*common, said("assistant", "d"), said("user", "e"), said("assistant", "f")]
    (document,), _ = encoded(
        encoder_of("chosen rejected", chat_template=template), (chosen, [*common, said("assistant", "x")])
    )
    end = "" if template else "$"
    found = ["".join(c for c in one if c in "abcdefx$") for one in text(document, only_learnt=True)]
    assert found == [f"d{end}f{end}", f"x{end}"]


def test_two_texts_are_taken_as_they_are_and_begin_with_the_prompt():
    (document,), _ = encoded(encoder_of("chosen rejected"), ("Human: Hi Bot: Yo", "Human: Hi Bot: Yes, hello"))
    assert text(document) == ["$Human: Hi Bot: Yo$", "$Human: Hi Bot: Yes, hello$"]
    assert text(document, only_learnt=True) == ["o$", "es, hello$"]
    bare = encoder_of("chosen rejected", tokenizer=ByteTokenizer(add_bos=False, add_eos=False))
    documents, _ = encoded(bare, ("a", "bc"), ("ab", "bc"))
    assert documents[0] is None  # nothing predicts the first token
    assert text(documents[1], only_learnt=True) == ["b", "c"]


def test_the_end_of_a_text_that_the_other_continues_is_learnt():
    (document,), _ = encoded(encoder_of("chosen rejected"), ("Yes", "Yes and no"))
    assert text(document, only_learnt=True) == ["$", " and no$"]


def test_names_of_special_tokens_in_texts_are_text():
    (document,), counts = encoded(encoder_of("chosen rejected"), ("a <|endoftext|> b", "a <|endoftext|> c"))
    assert document.tokens.tolist().count(256) == 2
    assert counts.notes() == [
        "2 names of special tokens in messages are encoded as ordinary text; the first in line 1: <|endoftext|>"
    ]


def test_what_teaches_nothing_is_skipped_and_counted():
    same = [said("user", "a"), said("assistant", "b")]
    documents, counts = encoded(
        encoder_of(), ("a", "b", "b"), ("a", "", "b"), ("", "a", "b"), ("a", None, "b"), ("a", "b", "c")
    )
    assert [document is not None for document in documents] == [False] * 4 + [True]
    assert counts.notes() == [
        "3 pairs are skipped: a prompt or an answer is empty; the first in line 2",
        "1 pairs are skipped: their answers are equal within a row; the first in line 1",
    ]
    documents, counts = encoded(encoder_of("chosen rejected"), (same, same), ("x", "x"), (same, [same[0], same[0]]))
    assert documents == [None] * 3
    assert [note[:30] for note in counts.notes()] == [
        "2 pairs are skipped: their ans",
        "1 pairs are skipped: one of th",
    ]


@pytest.mark.parametrize("align", [1, 128])
def test_a_pair_that_is_too_long_is_cut(align):
    keys = {"batch_invariant": align > 1, "max_target_length": 256 if align > 1 else 64}
    row = keys["max_target_length"]
    prompt, chosen, rejected = "p" * 40, "c" * 300, "r" * 20
    (document,), counts = encoded(encoder_of(**keys), (prompt, chosen, rejected))
    assert document.places(align) <= row
    first, second = text(document)
    if align == 1:
        kept = "$" + ("$User:\n" + prompt + "\nAssistant:\n")[-15:]  # a quarter of a row, with the first token
        assert (first[:16], second[:16]) == (kept, kept)
        assert (len(first), len(second)) == (16 + 17, 16 + 17)  # both are cut at the same position
        assert document.places() == row
    else:
        assert second.endswith("r" * 20 + "$\n")
        assert document.pairs == 128
    lost = len("$User:\n\nAssistant:\n") * 2 + 80 + 324 - len(first) - len(second)
    assert (counts.cut, counts.cut_tokens) == (1, lost)
    documents, counts = encoded(encoder_of(**keys, use_truncation=False), (prompt, chosen, rejected))
    assert documents == [None]
    assert f"they are longer than max_target_length={row} (use_truncation=false)" in counts.notes()[0]


def test_prompts_have_a_length_of_their_own():
    record = ("p" * 20, "c", "r")
    (document,), _ = encoded(encoder_of(dpo_max_prompt_length=16), record)
    assert text(document) == ["$ppp\nAssistant:\nc$\n", "$ppp\nAssistant:\nr$\n"]
    assert text(document, only_learnt=True) == ["c$", "r$"]
    (document,), _ = encoded(encoder_of(dpo_max_prompt_length=100), record)
    assert len(document.tokens) == 42
    documents, _ = encoded(encoder_of(dpo_max_prompt_length=16, use_truncation=False), record)
    assert documents == [None]
    documents, counts = encoded(encoder_of(dpo_max_prompt_length=63, max_target_length=64), ("p" * 99, "c", "r"))
    assert documents == [None]
    assert "their prompts leave no space in a row for answers" in counts.notes()[0]


def test_answers_that_are_equal_where_they_are_cut_are_skipped():
    documents, counts = encoded(encoder_of(max_target_length=64), ("p", "a" * 90 + "x", "a" * 90 + "y"))
    assert documents == [None]
    assert "their answers are equal within a row" in counts.notes()[0]


@pytest.mark.parametrize("length", range(4, 40))
def test_every_pair_that_is_kept_fits_and_learns_in_both(length):
    rng = np.random.default_rng(length)
    records = [tuple("x" * int(n) + "abc"[i] for i, n in enumerate(rng.integers(0, 30, 3))) for _ in range(20)]
    for limit in ("none", 3):
        for columns, some in (("prompt chosen rejected", records), ("chosen rejected", [one[1:] for one in records])):
            documents, _ = encoded(encoder_of(columns, max_target_length=length, dpo_max_prompt_length=limit), *some)
            for document in filter(None, documents):
                assert document.places() <= length
                assert all(part.loss.any() for part in (document, *document.after))
    assert length < 12 or documents != [None] * 20


@pytest.mark.parametrize(
    ("columns", "record", "message"),
    [
        ("chosen rejected", ("a", [said("user", "b")]), "line 1: one of the columns chosen and rejected holds text"),
        ("prompt chosen rejected", ("q", [said("user", "x"), said("assistant", "y")], "n"), "begins with a message of"),
        ("chosen rejected", ([{"content": "a"}], [said("user", "b")]), "line 1: chosen[0] has no role"),
        ("chosen rejected", (3, "a"), "column chosen holds int, not a list of messages"),
        ("chosen rejected", (b"\xff\xfe", "a"), "column chosen is not UTF-8 at byte 0"),
    ],
)
def test_what_is_no_pair_names_the_record(columns, record, message):
    with pytest.raises(UserError) as error:
        encoded(encoder_of(columns), record)
    assert message in str(error.value)


def test_a_function_makes_pairs(tmp_path, monkeypatch):
    (tmp_path / "my_pairs.py").write_text(
        "def one(row):\n    return {'chosen': row['good'], 'rejected': row['bad'], 'prompt': row['q']}\n"
        "def none(row):\n    return {'messages': []}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (document,), _ = encoded(encoder_of("bad q good", formatting_func_path="my_pairs:one"), ("No!", "Hi", "Yo"))
    assert text(document, only_learnt=True) == ["Yo$", "No!$"]
    with pytest.raises(UserError, match="must return a dict with prompt and chosen and rejected, or with chosen and"):
        encoded(encoder_of("bad q good", formatting_func_path="my_pairs:none"), ("No!", "Hi", "Yo"))


def test_whatever_changes_pairs_changes_the_identity():
    every = [{}, {"max_target_length": 64}, {"use_truncation": False}, {"dpo_max_prompt_length": 9}]
    every += [{"chat_template": PLAIN}, {"batch_invariant": True}]
    found = [json.dumps(encoder_of(**keys).identity, sort_keys=True) for keys in every]
    assert len(set(found)) == len(every)


def test_tokens_of_a_merging_tokenizer_differ_where_its_tokens_do():
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "good": 3, "day": 4, "days": 5}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<s>", "</s>"])
    (document,), _ = encoded(
        encoder_of("chosen rejected", tokenizer=JsonTokenizer(inner, "<s>", "</s>")), ("good day", "good days")
    )
    assert document.tokens.tolist() == [1, 3, 4, 2]
    assert [part.loss.tolist() for part in (document, *document.after)] == [[False, True, True]] * 2
