"""The tokenizer interface and its two implementations: tokenizers stored in tokenizer.json files, including those that
`train_bpe` trains, and the byte tokenizer."""

import abc
import codecs
import functools
import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.errors import UserError, shortened
from trainer.config.tokenizer_files import TEMPLATE_FILE, TEMPLATES, TOKENIZER_CONFIG, TOKENIZER_FILES, WITH_TOOLS
from trainer.config.words import visible
from trainer.data.beside import EOT_TEXT, Beside
from trainer.data.rendered import (
    Encoded,
    Rendered,
    at_plain_names,
    at_special_tokens,
    from_bytes,
    from_offsets,
    pattern,
)

if TYPE_CHECKING:
    import tokenizers

    from trainer.data.chat_files import ChatTemplate

MIN_VOCAB_SIZE = 257  # one token for each byte, and the special token
BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token that stands for one byte
# Byte-level tokens are written with one character per byte: bytes that are printable in Latin-1 stand for themselves,
# and the other bytes are mapped to the characters from U+0100 on, in order.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {byte: byte for byte in _PRINTABLE} | {256 + i: byte for i, byte in enumerate(_OTHERS)}
_NO_UNKNOWN = (
    "; a tokenizer without a token for unknown text must have tokens for all text: take another tokenizer_path, or add "
    "a token for unknown text to its vocabulary"
)
JSON_FILE, CONFIG_FILE = TOKENIZER_FILES["huggingface"], TOKENIZER_CONFIG


class package_errors:
    """A context manager that turns errors of the `tokenizers` package into a UserError. The message is `text`, the
    reason in parentheses, and `advice`.

    The package raises plain Exception and, if its Rust code panics, PanicException, which is a BaseException.
    """

    def __init__(self, text: str, advice: str = "; take another tokenizer_path"):
        self._text, self._advice = text, advice

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None and (kind is Exception or kind.__name__ == "PanicException"):
            raise UserError(f"{self._text} ({shortened(visible(str(error)))}){self._advice}") from error


class Tokenizer(abc.ABC):
    """Converts text to tokens and back.

    Attributes:
      vocab_size: ids are smaller than this.
      largest: the largest id that a document can contain. Some published tokenizers also have larger ids, of special
        tokens that documents never contain, such as Gemma 3's image tokens.
      bos, eos: the ids of the tokens before and after each document; None without such a token.
      bytes_per_token: int32 [vocab_size], the number of text bytes of each token; 0 for special tokens. None if these
        numbers would not be exact because the tokenizer changes the text.
      special_names: a dict from roles (bos_token, eos_token, ...) to the names of special tokens, for chat templates.
      own_template: the chat template in the tokenizer's files; None if there is none.
      chat_template: `own_template`, or the template that a run uses instead.
      beside: the content of the files next to the tokenizer's file, see `trainer.data.beside.Beside`.
      note: a line for the user about ignored settings in the tokenizer's file; "" if there are none.
    """

    vocab_size: int
    bos: int | None
    eos: int | None
    bytes_per_token: np.ndarray | None = None
    special_names: Mapping[str, str] = {}
    own_template: "ChatTemplate | None" = None
    chat_template: "ChatTemplate | None" = None
    beside: Beside = Beside()
    note: str = ""

    @property
    def largest(self) -> int:
        return self.vocab_size - 1

    @property
    def before_text(self) -> list[int]:
        """The ids of the special tokens to put before a prompt if no chat template is used. The tokenizer or the files
        next to it specify these tokens."""
        return [] if self.bos is None or self.beside.begins is False else [self.bos]

    @property
    def has_other_template(self) -> bool:
        """Whether `chat_template` differs from `own_template`."""
        texts = [one and (one.text, one.with_tools) for one in (self.chat_template, self.own_template)]
        return texts[0] != texts[1]

    def saved_files(self) -> dict[str, bytes]:
        """Returns a dict from relative paths to contents of files. tokenizer_path can load this tokenizer and its chat
        template from a folder with these files. Where possible, the files are unchanged copies of those from which the
        tokenizer was read."""
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder))
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()} | dict(self.beside.files)
        if self.chat_template and self.has_other_template:
            files = {name: data for name, data in files.items() if not name.startswith(TEMPLATES)}
            files[TEMPLATE_FILE] = self.chat_template.text.encode()
            if tools := self.chat_template.with_tools:
                files[f"{TEMPLATES}/{WITH_TOOLS}.jinja"] = tools.encode()
        return dict(sorted(files.items()))

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A hash that is equal for tokenizers that produce equal documents."""

    @abc.abstractmethod
    def encode_many(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Returns the tokens of each text, without special tokens: if a text contains the name of a special token, the
        name is encoded as plain text."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids` without special tokens. Bytes that are not valid UTF-8 become U+FFFD."""

    @abc.abstractmethod
    def save(self, directory: Path) -> None:
        """Writes into `directory` the files from which tokenizer_path can load this tokenizer: the vocabulary, and the
        names of required special tokens."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of `text`, without special tokens."""
        return list(self.encode_many([text])[0])

    def token_bytes(self, token: int) -> bytes:
        """Returns the UTF-8 bytes that `token` adds to a text. They may be only part of a character."""
        before = self.encode("a")  # a tokenizer may remove a space at the beginning
        return self.decode([*before, token])[len(self.decode(before)) :].encode()

    def vocabulary(self) -> list[bytes | None]:
        """Returns a list with the bytes of the token with each id: the UTF-8 of its text or, for a special token, of
        its name; None for an id without a token. Equal tokens have equal bytes even in tokenizers of different files or
        types."""
        names = {i: name.encode() for name, i in self.special_tokens.items()}
        return [names[i] if i in names else self.token_bytes(i) for i in range(self.vocab_size)]

    def id_of(self, name: str) -> int | None:
        """Returns the id of the special token `name`; None if there is none."""
        return self.special_tokens.get(name)

    @functools.cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """A dict from the names of the special tokens, which `encode_rendered` recognizes, to their ids."""
        return self._special_tokens()

    @functools.cached_property
    def markers(self) -> Mapping[str, int]:
        """A dict from names to ids of the tokens that can end a message: special tokens, and others that never occur in
        ordinary text."""
        return self._markers()

    @abc.abstractmethod
    def _special_tokens(self) -> Mapping[str, int]: ...

    def _markers(self) -> Mapping[str, int]:
        return self.special_tokens

    def encode_rendered(self, texts: Sequence[Rendered]) -> list[Encoded]:
        """Returns the tokens of rendered texts. Outside of messages, the name of a special token becomes that token."""
        names = pattern(self.special_tokens)
        return [Encoded.joined([self._part(*part) for part in at_special_tokens(text, names)]) for text in texts]

    def _part(self, text: str, start: int, special: bool) -> Encoded:
        if special:
            return Encoded.of(self.special_tokens[text], start, start + len(text))
        return from_bytes(text, start, *self._ends(text))

    def _ends(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """Returns the tokens of `text`, and for each token the number of bytes of `text` up to the token's end."""
        assert self.bytes_per_token is not None
        ids = self.encode(text)
        return ids, np.cumsum(self.bytes_per_token[np.asarray(ids, np.int32)])  # type: ignore[return-value]


class JsonTokenizer(Tokenizer):
    """A tokenizer in the format of the `tokenizers` package, tokenizer.json."""

    def __init__(self, inner: "tokenizers.Tokenizer", bos: str | None, eos: str | None):
        # Encode names of special tokens in a text as plain text. The saved file does not contain this setting.
        inner.encode_special_tokens = True
        # The configuration determines the row length, so the file's truncation and padding are disabled.
        inner.no_truncation()
        inner.no_padding()
        # Encoding must be deterministic. Only a BPE with dropout is random, so its dropout is disabled.
        if getattr(inner.model, "dropout", None):
            inner.model.dropout = None
        self._inner, self._names = inner, (bos, eos)
        self.special_names = {role: name for role, name in (("bos_token", bos), ("eos_token", eos)) if name is not None}
        ids = inner.get_vocab()
        self.vocab_size = max(ids.values()) + 1
        self.bos, self.eos = (None if name is None else ids[name] for name in self._names)
        spec = json.loads(inner.to_str())
        self._in_bytes = (spec.get("decoder") or {}).get("type") == "ByteLevel"
        if _is_byte_level(spec):
            self.bytes_per_token = np.zeros(self.vocab_size, np.int32)
            for token, i in ids.items():
                # A byte-level token is written with one character per byte.
                self.bytes_per_token[i] = len(token)
            for i, added in inner.get_added_tokens_decoder().items():
                self.bytes_per_token[i] = 0 if added.special else len(added.content.encode())

    def __reduce__(self) -> Any:
        # Unpickling must call __init__ to set encode_special_tokens again, because pickling loses it.
        own = {"special_names", "own_template", "chat_template", "beside", "note"}
        given = {name: value for name, value in vars(self).items() if name in own}
        return JsonTokenizer, (self._inner, *self._names), given

    @property
    def largest(self) -> int:
        added = self._inner.get_added_tokens_decoder().items()
        unused = {i for i, token in added if token.special} - {self.bos, self.eos}
        return max((i for i in self._inner.get_vocab().values() if i not in unused), default=-1)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._names} {self._inner.to_str()}".encode()).hexdigest()

    def _special_tokens(self) -> Mapping[str, int]:
        return {token.content: i for i, token in self._inner.get_added_tokens_decoder().items() if token.special}

    def _markers(self) -> Mapping[str, int]:
        # Added tokens of whitespace are excluded: Gemma's tokenizers have such tokens for newlines and spaces.
        added = self._inner.get_added_tokens_decoder().items()
        return {token.content: i for i, token in added if token.special or token.content.strip()}

    @functools.cached_property
    def _of_chats(self) -> "tokenizers.Tokenizer":
        """A copy of the tokenizer that recognizes special tokens, and has no post-processor, because a post-processor
        may trim offsets."""
        import tokenizers

        return tokenizers.Tokenizer.from_str(json.dumps(json.loads(self._inner.to_str()) | {"post_processor": None}))

    def encode_rendered(self, texts: Sequence[Rendered]) -> list[Encoded]:
        rows = [list(at_plain_names(text)) for text in texts]
        encoded = {
            plain: iter(self._batch(inner, [text for row in rows for text, _, is_plain in row if is_plain == plain]))
            for plain, inner in ((False, self._of_chats), (True, self._inner))
        }
        found = [[(next(encoded[plain]), start) for _, start, plain in row] for row in rows]
        return [Encoded.joined([from_offsets(it.ids, it.offsets, start) for it, start in row]) for row in found]

    def encode_many(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [encoding.ids for encoding in self._batch(self._inner, texts, offsets=False)]

    def _batch(self, inner: "tokenizers.Tokenizer", texts: Sequence[str], offsets: bool = True) -> list[Any]:
        failed = f"the tokenizer cannot encode the text {shortened(''.join(texts[:1]))!r}"
        try:
            with package_errors(failed, _NO_UNKNOWN):
                # `encode` blocks other threads, so it is used only for short texts.
                if len(texts) == 1 and len(texts[0]) < 1 << 20:
                    return [inner.encode(texts[0], add_special_tokens=False)]
                encode = inner.encode_batch if offsets else inner.encode_batch_fast
                return encode(texts, add_special_tokens=False)
        except UserError:
            if len(texts) == 1:
                raise
            # The texts are encoded again one by one, so that the error names the text that failed.
            return [encoding for text in texts for encoding in self._batch(inner, [text], offsets)]

    def decode(self, ids: Iterable[int]) -> str:
        with package_errors("the tokenizer cannot decode the tokens"):
            return self._inner.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        piece = self._inner.id_to_token(token) or ""
        if self._in_bytes and token not in self._inner.get_added_tokens_decoder():
            return _of_byte_level(piece)
        return piece_bytes(piece) if BYTE.fullmatch(piece) else super().token_bytes(token)

    def vocabulary(self) -> list[bytes | None]:
        found: list[bytes | None] = [None] * self.vocab_size
        convert = _of_byte_level if self._in_bytes else piece_bytes
        for piece, i in self._inner.get_vocab().items():
            # A damaged file may give several tokens the same id. The package lists tokens in random order, so `max`
            # chooses one of them deterministically.
            found[i] = max(found[i] or b"", convert(piece))
        for i, token in self._inner.get_added_tokens_decoder().items():
            found[i] = token.content.encode() if self._in_bytes else piece_bytes(token.content)
        return found

    @property
    def before_text(self) -> list[int]:
        if self.bos is None:
            return []
        if self._inner.post_processor is None:
            return [self.bos] if self.beside.begins else []
        ids = self._inner.encode("", add_special_tokens=True).ids
        return [token for token in ids if token != self._inner.token_to_id(self._names[1] or "") or token == self.bos]

    def save(self, directory: Path) -> None:
        begins = {} if self.beside.begins is None else {"add_bos_token": self.beside.begins}
        (directory / JSON_FILE).write_text(self._inner.to_str(pretty=True), encoding="utf-8")
        (directory / CONFIG_FILE).write_text(json.dumps({**self.special_names, **begins}) + "\n", encoding="utf-8")


def train_bpe(texts: Iterable[str], vocab_size: int, *, add_bos: bool = True, add_eos: bool = True) -> JsonTokenizer:
    """Trains a byte-level BPE of at most `vocab_size` tokens. Equal texts give equal tokenizers.

    The tokenizer has one special token, which is put before (`add_bos`) and after (`add_eos`) each document.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = JsonTokenizer(bpe, EOT_TEXT if add_bos else None, EOT_TEXT if add_eos else None)
    tokenizer.beside = Beside(begins=True)
    return tokenizer


class ByteTokenizer(Tokenizer):
    """Each byte of the UTF-8 text is a token. Token 256 precedes (`add_bos`) and follows (`add_eos`) each document."""

    def __init__(self, *, add_bos: bool = True, add_eos: bool = True):
        self.vocab_size = 257
        self.bos, self.eos = 256 if add_bos else None, 256 if add_eos else None
        self.bytes_per_token = np.array([1] * 256 + [0], np.int32)
        self.special_names = {"bos_token": EOT_TEXT, "eos_token": EOT_TEXT}

    def _special_tokens(self) -> Mapping[str, int]:
        return {EOT_TEXT: 256}

    @property
    def fingerprint(self) -> str:
        return f"bytes {self.bos} {self.eos}"

    def encode_many(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]  # type: ignore[misc]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def save(self, directory: Path) -> None:
        (directory / CONFIG_FILE).write_text(json.dumps({"tokenizer_type": "bytes"}) + "\n", encoding="utf-8")


def piece_bytes(piece: str) -> bytes:
    """Returns the UTF-8 of a sentencepiece token. In such a token, U+2581 stands for a space; the token <0xNN> is a
    single byte."""
    byte = BYTE.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("\u2581", " ").encode()


def _of_byte_level(piece: str) -> bytes:
    try:
        return codecs.charmap_encode(piece, "strict", _BYTE_OF)[0]
    except UnicodeEncodeError:  # a token with other characters, which the package's decoder also leaves unchanged
        return piece.encode()


def _is_byte_level(spec: dict[str, Any]) -> bool:
    """Returns whether a tokenizer's tokens represent exactly the bytes of the text. `spec` is the content of its
    tokenizer.json."""
    if spec.get("normalizer") or (spec.get("decoder") or {}).get("type") != "ByteLevel":
        return False
    steps = spec.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    return len(levels) == 1 and not levels[0].get("add_prefix_space")
