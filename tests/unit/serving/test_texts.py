"""Texts of tokens: stop strings across tokens, complete characters, token names and offsets."""

import random

import pytest
import tokenizers
from tokenizers import decoders, models

from trainer.data.tokenizer import ByteTokenizer, train_bpe
from trainer.data.tokenizer_files import load_tokenizer
from trainer.inference.scheduler import Event
from trainer.serving.texts import Names, Text


def streamed(text, stop, end="length", prompt=()):
    """Returns the parts of the streamed `text`, with one token per byte, and its tokens."""
    made, parts, tokens = Text(ByteTokenizer(), prompt, stop), [], []
    data = text if isinstance(text, bytes) else text.encode()
    for i, byte in enumerate(data):
        part, more = made.add(Event(0, byte, end=end if i == len(data) - 1 else None))
        parts.append(part)
        tokens += more
    return made, parts, tokens


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello world", ["o w"], "hell"),
        ("hello world", ["xyz", "world!", "lo"], "hel"),
        ("aaab", ["aab"], "a"),
        ("abcabd", ["abd"], "abc"),
        ("ends with sto", ["stop"], "ends with sto"),
        ("a😀b", ["😀"], "a"),
        ("abcd", ["cd", "bcde", "b"], "a"),
        ("stop", ["s"], ""),
    ],
)
def test_a_stop_string_is_not_sent(text, stop, expected):
    made, parts, tokens = streamed(text, stop)
    assert "".join(parts) == expected
    assert made.stopped == (expected != text)
    assert len(tokens) == len(expected.encode())
    for i in range(len(parts)):  # no text that was sent is retracted
        assert expected.startswith("".join(parts[:i]))


def test_random_stop_strings():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randint(1, 14)))
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        first = min((text.find(one) for one in stop if one in text), default=len(text))
        # The text ends with the token that completes a stop string; another stop string may begin earlier.
        done = min((text.find(one) + len(one) for one in stop if one in text), default=len(text))
        first = min((i for one in stop if (i := text[:done].find(one)) >= 0), default=first)
        _, parts, _ = streamed(text, stop)
        assert "".join(parts) == text[:first], (text, stop)


def test_text_that_cannot_be_the_beginning_of_a_stop_string_is_sent_at_once():
    _, parts, _ = streamed("ab stop", ["stop it"])
    assert parts == ["a", "b", " ", "", "", "", "stop"]


def test_characters_are_whole():
    _, parts, tokens = streamed("a😀é", [])
    assert parts == ["a", "", "", "", "😀", "", "é"]
    assert [token.start for token in tokens] == [0, 1, 1, 1, 1, 2, 2]
    _, parts, tokens = streamed("a😀".encode()[:-1], [])
    assert "".join(parts) == "a"
    assert len(tokens) == 4


def test_a_stop_token_counts_and_has_no_text():
    made, *_ = streamed("ab", [], end=None)
    assert made.add(Event(0, None, -1.5, "stop", 256)) == ("", [(256, -1.5, (), 2)])
    assert made.count == 3


def test_names_of_tokens():
    tokenizer = train_bpe(["hello world é 😀 " * 9], 300)
    names = Names(tokenizer)
    for text in ("hello world", " é😀", "<|endoftext|>"):
        tokens = tokenizer.encode(text)
        assert b"".join(map(names.bytes_of, tokens)).decode() == text
    assert names.text(tokenizer.eos) == "<|endoftext|>"
    assert names.text(10**6) == ""
    (half, *_) = tokenizer.encode("ü")
    assert names.text(half) == "bytes:\\xc3"
    row = [tokenizer.bos, *tokenizer.encode("é w")]
    text = [tokenizer.decode(row[:i]) for i in range(len(row))]
    assert names.starts(row)[2:] == [len(part.rstrip("\ufffd")) for part in text][2:]
    assert names.starts(row)[:2] == [0, 0]


def bytes_and_letters():
    """Tokens 0 to 255 are bytes, as in SentencePiece's files, and 256 is a letter."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"x": 256}
    model = models.BPE(vocab, [], byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return made


@pytest.mark.parametrize(
    ("tokens", "cut"),
    [
        ([256, 0xFF, 0x41, 0x42], 0),  # byte tokens with an invalid byte are replaced as a whole
        ([256, 0x41, 0x42], 0),
        ([256, 0xE2, 0x82], 2),
        ([256, 0xE2, 0x82, 0xAC], 0),
        ([256, 0xEF, 0xBF, 0xBD], 0),
    ],
)
def test_only_half_a_character_is_left_out_at_the_end(tokens, cut, tmp_path):
    inner = bytes_and_letters()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path), "auto", add_bos=False, add_eos=False)
    text = Text(tokenizer, (), [])
    parts = [
        text.add(Event(0, token, end="length" if i == len(tokens) - 1 else None))[0] for i, token in enumerate(tokens)
    ]
    theirs = inner.decode(tokens)
    assert "".join(parts) == theirs[: len(theirs) - cut]
