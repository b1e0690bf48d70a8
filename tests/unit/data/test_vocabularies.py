"""Vocabularies of tokenizers of all types, compared token by token."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_cases import KINDS, tokenizer_folder
from sample_data import document

from trainer.config.errors import UserError
from trainer.data.gguf_tokenizer import BYTE, CONTROL, NORMAL, OWN, OWN_SYMBOL, UNKNOWN, tokenizer_files
from trainer.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, train_bpe
from trainer.data.tokenizer_files import load_tokenizer
from trainer.data.vocabularies import Shared, shared_tokens
from trainer.leaves.about import About
from trainer.leaves.gguf_file import GgufHeader
from trainer.weights.gguf.tokenizer import tokenizer_values

NAMES = ("tokenizer_path=s", "teacher_path=t")
WORDS = ("a", "b", "c", "\u0120the", "\u00e3", "\u0120of")  # in a byte-level tokenizer: " the", 0xE3, " of"
OVER = "the divergence is computed over the 7 common tokens only"


def of(
    words: tuple[str, ...] | dict[str, int] = WORDS,
    special: tuple[str, ...] = ("<s>",),
    plain: tuple[str, ...] = (),
    eos: str | None = None,
    merges: tuple[tuple[str, str], ...] = (),
) -> JsonTokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    ids = words if isinstance(words, dict) else {word: i for i, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.BPE(ids, list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    inner.add_tokens(list(plain))
    bos = special[0] if special else "<s>"
    return JsonTokenizer(inner, bos, eos or bos)


def loaded(path: Path) -> Tokenizer:
    return load_tokenizer(str(path), "auto", add_bos=True, add_eos=True)


def refused(student: Tokenizer, teacher: Tokenizer) -> str:
    with pytest.raises(UserError) as error:
        shared_tokens(student, teacher, NAMES)
    with pytest.raises(UserError):
        shared_tokens(teacher, student)
    return str(error.value)


def test_equal_vocabularies_may_merge_in_another_way():
    words = (*WORDS, "ab", "bc", "abc")
    left = of(words, merges=(("a", "b"), ("b", "c"), ("ab", "c")))
    right = of(words, merges=(("b", "c"), ("a", "b"), ("a", "bc")))
    assert left.encode("bcab") == right.encode("bcab")
    assert left.fingerprint != right.fingerprint
    assert shared_tokens(left, right) == Shared(10, 10, 10, "")


def test_one_is_a_prefix_of_the_other():
    base, chat = of(), of(special=("<s>", "<|im_start|>"), plain=("<tool>",))
    assert shared_tokens(base, chat, NAMES) == Shared(
        *(7, 7, 9),
        f"teacher_path=t has 2 more tokens: {OVER}, and the teacher's distribution leaves out the others",
    )
    assert shared_tokens(chat, base, NAMES) == Shared(
        *(7, 9, 7),
        f"tokenizer_path=s has 2 more tokens: {OVER}, and after the first extra token, a document is trained on its "
        "labels only",
    )


def test_other_ends_of_documents_are_noted():
    base, chat = of(), of(special=("<s>", "<|im_end|>"), eos="<|im_end|>")
    other = of(special=("<s>", "<|im_end|>"))
    ends = "documents end with the special token {} as in tokenizer_path=s, not with the special token {} as in {}"
    assert shared_tokens(other, chat, NAMES) == (8, 8, 8, ends.format("'<s>'", "'<|im_end|>'", NAMES[1]))
    first, _, second = shared_tokens(chat, base, NAMES).note.partition("; ")
    assert first.startswith("tokenizer_path=s has 1 more token: ")
    assert second == ends.format("'<|im_end|>'", "'<s>'", NAMES[1])
    silent = of()
    silent.bos = silent.eos = None  # add_bos=false, add_eos=false
    assert shared_tokens(silent, base).note == ""


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (
            of((*WORDS[:3], "\u0120The", *WORDS[4:])),
            "1 of 7 tokens. The first is token 3: the ordinary token ' the' and ",
        ),
        (
            of((*WORDS[:4], "\u00e4", "of")),
            "2 of 7 tokens. The first is token 4: the bytes b'\\xe3' and the bytes b'\\xe4'.",
        ),
        (
            of(special=("</s>", "<s>")),
            "1 of 7 tokens. The first is token 6: the special token '<s>' and the special token '</",
        ),
        (of(special=("<\u00e9>",)), "and the special token '<\u00e9>'. A student"),
        (
            of((*WORDS, "<s>"), ()),
            "1 of 7 tokens. The first is token 6: the special token '<s>' and the ordinary token '<s>'.",
        ),
        (
            of((*WORDS[:2], "\u0137\u0120\u202e", *WORDS[3:])),
            "token 2: the ordinary token 'c' and the ordinary token '",
        ),
        (
            of((*WORDS[:2], "c" * 300, *WORDS[3:])),
            f"and the ordinary token '{'c' * 40}'... (300 characters). A student",
        ),
    ],
)
def test_the_first_difference_is_shown(other: JsonTokenizer, shown: str):
    message = refused(of(), other)
    assert message.startswith("tokenizer_path=s and teacher_path=t differ in ")
    assert shown in message
    assert message.isprintable()
    assert message.endswith("or a student that was created with the teacher's tokenizer")


def test_ids_without_tokens_are_equal_only_to_each_other():
    gaps = {"a": 0, "<s>": 2, "b": 4}
    assert of(gaps).vocabulary() == [b"a", None, b"<s>", None, b"b"]
    assert shared_tokens(of(gaps), of(gaps | {"c": 7})) == (
        *(5, 5, 8),
        "the teacher's tokenizer has 1 more token: the divergence is computed over the 5 common tokens only, and the "
        "teacher's distribution leaves out the others",
    )
    assert "1 of 5 tokens. The first is token 3: no token and the ordinary token 'c'." in refused(
        of(gaps), of(gaps | {"c": 3})
    )


def test_two_tokens_with_one_id_are_read_in_one_order():
    """The package lists a vocabulary in varying order."""
    repeated = {"a": 0, "b": 1, "c": 1, "d": 1, "e": 1, "<s>": 2, "f": 3}
    assert {tuple(of(repeated).vocabulary()) for _ in range(20)} == {(b"a", b"e", b"<s>", b"f")}


def test_an_added_token_may_lack_the_mark_of_special_ones():
    """Like Qwen 2.5's <|fim_prefix|>, which is special only in llama.cpp's files."""
    marked, unmarked = of(special=("<s>", "<|fim|>")), of(plain=("<|fim|>",))
    assert shared_tokens(marked, unmarked) == shared_tokens(unmarked, marked) == (8, 8, 8, "")


def test_a_normalizer_hides_no_difference():
    """The package's decoder shows each partial character as U+FFFD."""
    from tokenizers import normalizers

    left, right = of(), of((*WORDS[:4], "\u00e4", WORDS[5]))
    for tokenizer in (left, right):
        tokenizer._inner.normalizer = normalizers.NFC()
    left, right = (JsonTokenizer(it._inner, "<s>", "<s>") for it in (left, right))
    assert left.bytes_per_token is None
    assert "token 4: the bytes b'\\xe3' and the bytes b'\\xe4'" in refused(left, right)


def test_bytes_and_ranks(tmp_path: Path):
    assert shared_tokens(ByteTokenizer(), ByteTokenizer()) == (257, 257, 257, "")
    bpe = train_bpe([document(i) for i in range(20)], 300)
    assert "257 of 257 tokens. The first is token 0: the ordinary token '\\x00' and" in refused(ByteTokenizer(), bpe)
    tokens = [token for token in bpe.vocabulary()[1:] if token is not None]
    lines = [base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)]
    (tmp_path / "ranks.tiktoken").write_bytes(b"".join(lines))
    ranks = loaded(tmp_path / "ranks.tiktoken")
    words = sorted(bpe._inner.get_vocab(), key=bpe._inner.get_vocab().__getitem__)[1:]
    chars = {word: token[0] for word, token in zip(words, tokens, strict=True) if len(token) == 1}
    assert shared_tokens(ByteTokenizer(), of(chars, ("<|endoftext|>",))) == (257, 257, 257, "")
    special = sorted(ranks.special_tokens, key=ranks.special_tokens.__getitem__)
    assert shared_tokens(of(tuple(words), tuple(special), eos=special[1]), ranks) == (555, 555, 555, "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_has_the_vocabulary_of_its_folder(kind: str, tmp_path: Path):
    """Three of the rows are padding."""
    values = tokenizer_values(tmp_path, About(), tokenizer_folder(kind, tmp_path) + 3)
    again = tmp_path / "again"
    again.mkdir()
    for name, data in tokenizer_files(header(values, again)).items():
        (again / name).write_bytes(data)
    student, teacher = loaded(tmp_path), loaded(again)
    size = len(values[f"{OWN}tokens"]) - 3
    assert shared_tokens(student, teacher) == (size, size, size, "")


def header(values: dict[str, Any], path: Path) -> GgufHeader:
    return GgufHeader(path, values | {f"{OWN}token_type": np.array(values[f"{OWN}token_type"], np.int32)}, {}, 0)


def test_a_sentencepiece_model_and_its_conversion(tmp_path: Path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([document(i) for i in range(50)]),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=["<turn>", "\u2581\u2581"],
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    ids = range(330)
    kinds = [UNKNOWN, CONTROL, CONTROL, CONTROL, OWN_SYMBOL, *(BYTE if model.is_byte(i) else NORMAL for i in ids[5:])]
    values = {
        f"{OWN}model": "llama",
        f"{OWN}tokens": model.id_to_piece([*ids]),
        f"{OWN}scores": np.array(model.get_score([*ids]), np.float32),
        f"{OWN}token_type": kinds,
    }
    converted = tmp_path / "converted"
    converted.mkdir()
    for name, data in tokenizer_files(header(values, converted)).items():
        (converted / name).write_bytes(data)
    student, teacher = loaded(tmp_path / "tokenizer.model"), loaded(converted)
    assert shared_tokens(student, teacher) == (330, 330, 330, "")
    assert student.vocabulary()[:5] == [b"<unk>", b"<s>", b"</s>", b"<turn>", b"  "]
    assert not [token for token in student.vocabulary() if token is None or "\u2581" in token.decode(errors="ignore")]
    file = converted / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["model"]["vocab"]["<0xFE>"], spec["model"]["vocab"]["<0xFF>"] = 260, 259
    file.write_text(json.dumps(spec))
    assert "differ in 2 of 330 tokens. The first is token 259: the bytes b" in refused(student, loaded(converted))
