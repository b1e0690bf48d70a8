"""Loads the tokenizer that tokenizer_path and tokenizer_type specify."""

import base64
import binascii
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.errors import UserError
from trainer.config.paths import local_path
from trainer.config.tokenizer_files import (
    SETTINGS,
    SPECIAL_TOKENS,
    TOKENIZER_FILES,
    VOCABULARIES,
    is_gguf,
    says_bytes,
    tokenizer_parts,
)
from trainer.data.beside import read_beside
from trainer.data.chat_files import template_beside
from trainer.data.gguf_tokenizer import KIND, NO_TOKENIZER, tokenizer_files
from trainer.data.growth import growth_problem
from trainer.data.tokenizer import (
    BYTE,
    CONFIG_FILE,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    package_errors,
    piece_bytes,
)
from trainer.leaves.gguf_file import read_gguf
from trainer.runtime.folders import check_folder, read_bounded

# The special tokens of well-known tokenizers, for a tokenizer.json without a tokenizer_config.json.
_BEGINS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "[BOS]")
_ENDS = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[EOS]")
# Llama 3's word-splitting pattern and number of special tokens. Its rank file contains neither. Source:
# https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_LLAMA3_SPECIAL = 256
_LLAMA3_NAMES = {
    **{0: "<|begin_of_text|>", 1: "<|end_of_text|>"},
    **{6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"},
}
_LACKS = f"tokenizer_path: {{folder}}: {CONFIG_FILE} or {SPECIAL_TOKENS} names {{name}}, which {{file}} lacks"
_SYMBOL = re.compile(r"<[^<>\s]+>")
_MOST_TOKENS = 1 << 24  # the limit of token ids: a table of this many entries fits in memory
# Runs of more white-space characters than this limit are split, because matching the word pattern backtracks over white
# space, and overflows the stack on a run of less than a million characters.
_SPACE_LIMIT = 25_000
_LONG_SPACE = re.compile(rf"(?<!\s)\s{{{_SPACE_LIMIT + 1},}}")


def load_tokenizer(path: str, kind: str, *, add_bos: bool, add_eos: bool) -> Tokenizer:
    """Returns the tokenizer in the file or folder `path`. `kind` is the value of tokenizer_type; with auto, the type is
    detected from the file. The tokenizer of a GGUF file is converted to Hugging Face files and loaded from them.

    Raises UserError if the file is missing or is not a tokenizer of that type, or a required package is not installed.
    """
    if kind == "bytes":
        return ByteTokenizer(add_bos=add_bos, add_eos=add_eos)
    if is_gguf(gguf := local_path(path, "tokenizer_path=")) and kind in ("auto", "huggingface"):
        return _of_gguf(gguf, add_bos=add_bos, add_eos=add_eos)
    file = _file(local_path(path, "tokenizer_path="), kind)
    kind = _kind(file) if kind == "auto" else kind
    loaders: dict[str, Callable[..., Tokenizer]] = {
        "bytes": lambda file, **settings: ByteTokenizer(**settings),
        "huggingface": _load_json,
        "sentencepiece": SentencePieceTokenizer,
        "tiktoken": TiktokenTokenizer,
    }
    beside = read_beside(file)
    more = {"names": beside.names} if kind == "huggingface" else {}
    tokenizer = loaders[kind](file, add_bos=add_bos, add_eos=add_eos, **more)
    if kind != "bytes" and not beside.files.keys().isdisjoint((CONFIG_FILE, SPECIAL_TOKENS)):
        tokenizer.special_names = beside.names
        if kind != "huggingface":
            tokenizer.bos, tokenizer.eos = (_named(tokenizer, role, file) for role in ("bos_token", "eos_token"))
    tokenizer.beside = beside
    tokenizer.chat_template = tokenizer.own_template = template_beside(file.parent)
    return tokenizer


def tokenizer_parts_of(place: Any) -> dict[str, bytes]:
    """Returns a dict from the relative paths of the tokenizer's files in `place` to their contents. `place` is a local
    folder, a folder in a bucket, or a GGUF file.

    Raises:
      UserError: a file is too large, or the type of a GGUF file's tokenizer is unknown.
    """
    if is_gguf(place):
        header = read_gguf(place)
        return tokenizer_files(header) if header.values.get(KIND, NO_TOKENIZER) != NO_TOKENIZER else {}
    return {name: read_bounded(place / name) for name in tokenizer_parts(place)}


def _of_gguf(file: Path, *, add_bos: bool, add_eos: bool) -> Tokenizer:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, data in tokenizer_files(read_gguf(file)).items():
            (folder / part).parent.mkdir(exist_ok=True)
            (folder / part).write_bytes(data)
        try:
            tokenizer = load_tokenizer(name, "huggingface", add_bos=add_bos, add_eos=add_eos)
        except UserError as error:
            raise UserError(str(error).replace(name, str(file))) from error
    if template := tokenizer.own_template:
        tokenizer.chat_template = tokenizer.own_template = template._replace(where=str(file))
    return tokenizer


def _named(tokenizer: Tokenizer, role: str, file: Path) -> int | None:
    """Returns the id of the token for `role` (bos_token or eos_token): the token that the files next to `file`, the
    tokenizer's file, specify, otherwise `tokenizer.bos` or `tokenizer.eos`. If this attribute is None, as with
    add_bos=false or add_eos=false, always returns None. Raises UserError if the tokenizer lacks the specified token."""
    own = tokenizer.bos if role == "bos_token" else tokenizer.eos
    name = tokenizer.special_names.get(role)
    if own is None or name is None:
        return own
    if (found := tokenizer.id_of(name)) is None:
        raise UserError(_LACKS.format(folder=file.parent, name=name, file=file.name))
    return found


class SentencePieceTokenizer(Tokenizer):
    """The tokenizer of a sentencepiece model. The model may normalize text, so tokens do not represent exact bytes."""

    def __init__(self, file: Path, *, add_bos: bool, add_eos: bool):
        sentencepiece = _import("sentencepiece", "sentencepiece")
        self._file, self._data = file, read_bounded(file)
        self._inner = sentencepiece.SentencePieceProcessor()
        try:
            self._inner.LoadFromSerializedProto(self._data)
            self._names = self._inner.id_to_piece(list(range(self._inner.vocab_size())))
        except (RuntimeError, UnicodeDecodeError) as error:
            raise UserError(f"tokenizer_path: {file} is not a sentencepiece model ({error})") from error
        self.vocab_size = len(self._names)
        bos, eos = self._inner.bos_id(), self._inner.eos_id()
        self.bos = (bos if bos >= 0 else _required(eos, file, "add_bos")) if add_bos else None
        self.eos = _required(eos, file, "add_eos") if add_eos else None
        ids = {"bos_token": bos, "eos_token": eos}
        self.special_names = {role: self._names[i] for role, i in ids.items() if i >= 0}

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.bos} {self.eos}".encode() + self._data).hexdigest()

    def encode_many(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return self._inner.encode(list(texts))

    def token_bytes(self, token: int) -> bytes:
        piece = self._names[token]
        return piece_bytes(piece) if BYTE.fullmatch(piece) else super().token_bytes(token)

    def vocabulary(self) -> list[bytes | None]:
        return [piece_bytes(piece) for piece in self._names]

    def id_of(self, name: str) -> int | None:
        found = self._inner.piece_to_id(name)
        return found if self._inner.id_to_piece(found) == name else None

    def _special_tokens(self) -> Mapping[str, int]:
        return self._pieces(self._inner.is_control)

    def _markers(self) -> Mapping[str, int]:
        # The package does not report which pieces are user-defined symbols, such as <end_of_turn>. So every piece in
        # angle brackets that is not a byte counts as one.
        return self._pieces(lambda i: _SYMBOL.fullmatch(self._names[i]) and not self._inner.is_byte(i))

    def _pieces(self, chosen: Callable[[int], Any]) -> dict[str, int]:
        return {name: i for i, name in enumerate(self._names) if chosen(i)}

    def _ends(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        pieces = self._inner.encode(text, return_type="proto").pieces
        return [piece.id for piece in pieces], [piece.end for piece in pieces]

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode([i for i in ids if i < self.vocab_size and not self._inner.is_control(i)])

    def save(self, directory: Path) -> None:
        (directory / TOKENIZER_FILES["sentencepiece"]).write_bytes(self._data)


class TiktokenTokenizer(Tokenizer):
    """The tokenizer of a rank file, with Llama 3's word-splitting pattern. Each line of the file contains a token's
    bytes in base64, a space, and the token's rank, which is its id. The 256 ids after the last rank are special tokens,
    which are not in the file."""

    def __init__(self, file: Path, *, add_bos: bool, add_eos: bool):
        tiktoken = _import("tiktoken", "tiktoken")
        self._file = file
        ranks = _read_ranks(file)
        count = len(ranks)
        names = [_LLAMA3_NAMES.get(i, f"<|special_{i}|>") for i in range(_LLAMA3_SPECIAL)]
        special = {name: count + i for i, name in enumerate(names)}
        self.special_names = {"bos_token": names[0], "eos_token": names[1]}
        self._inner = tiktoken.Encoding(file.name, pat_str=_LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens=special)
        self._text_tokens, self.vocab_size = count, count + _LLAMA3_SPECIAL
        self.bos, self.eos = count if add_bos else None, count + 1 if add_eos else None
        self.bytes_per_token = np.zeros(self.vocab_size, np.int32)
        for token, rank in ranks.items():
            self.bytes_per_token[rank] = len(token)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.bos} {self.eos}".encode() + read_bounded(self._file)).hexdigest()

    def _special_tokens(self) -> Mapping[str, int]:
        return {name: self._inner.encode_single_token(name) for name in self._inner.special_tokens_set}

    def token_bytes(self, token: int) -> bytes:
        return self._inner.decode_single_token_bytes(token)

    def encode_many(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        if any(map(_LONG_SPACE.search, texts)):
            return [[i for part in _parts(text) for i in self._inner.encode_ordinary(part)] for text in texts]
        if len(texts) == 1:
            return [self._inner.encode_ordinary(texts[0])]
        return self._inner.encode_ordinary_batch(list(texts))

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode([i for i in ids if i < self._text_tokens], errors="replace")

    def save(self, directory: Path) -> None:
        shutil.copyfile(self._file, directory / TOKENIZER_FILES["tiktoken"])


def _parts(text: str) -> Iterator[str]:
    """Yields `text` in parts, split wherever a run of white space is too long for the word pattern."""
    start = 0
    for match in _LONG_SPACE.finditer(text):
        for end in range(match.start() + _SPACE_LIMIT, match.end(), _SPACE_LIMIT):
            yield text[start:end]
            start = end
    yield text[start:]


def _load_json(file: Path, *, add_bos: bool, add_eos: bool, names: Mapping[str, str]) -> JsonTokenizer:
    import tokenizers

    refused = f"tokenizer_path: {file} is not a tokenizer.json"
    try:
        text = read_bounded(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{refused} ({error})") from error
    if problem := growth_problem(text):
        raise UserError(f"tokenizer_path: {file}: {problem}; take another tokenizer_path")
    with package_errors(refused, ""):
        inner = tokenizers.Tokenizer.from_str(text)
        inner.encode("")  # also applies the post-processor, to detect errors in it
    vocabulary = inner.get_vocab()
    if not vocabulary or max(vocabulary.values()) >= _MOST_TOKENS:
        raise UserError(f"tokenizer_path: {file}: it has no tokens, or token ids of {_MOST_TOKENS} or more")
    begin = names.get("bos_token") or next((name for name in _BEGINS if name in vocabulary), None)
    end = names.get("eos_token") or next((name for name in _ENDS if name in vocabulary), None)
    for name in (begin, end):
        if name is not None and name not in vocabulary:
            raise UserError(_LACKS.format(folder=file.parent, name=name, file=file.name))
    # Tokenizers without a begin token, such as GPT-2's and Qwen's, separate documents by their end token.
    begin = begin or end
    for key, wanted, name in (("add_bos", add_bos, begin), ("add_eos", add_eos, end)):
        if wanted and name is None:
            raise UserError(
                f"tokenizer_path: {file} has no known special token for the start or end of a document; name bos_token "
                f"and eos_token in a {CONFIG_FILE} next to it, or set {key}=false"
            )
    dropout = getattr(inner.model, "dropout", None)
    tokenizer = JsonTokenizer(inner, begin if add_bos else None, end if add_eos else None)
    if dropout:
        tokenizer.note = f"{file}: its dropout={dropout:.3g} is turned off, so that equal texts have equal tokens"
    known = {"bos_token": begin, "eos_token": end}
    tokenizer.special_names = {name: value for name, value in known.items() if value is not None}
    return tokenizer


def _file(path: Path, kind: str) -> Path:
    """Returns the path of the tokenizer's file; `path` is this file or its folder."""
    names = [TOKENIZER_FILES[kind]] if kind in TOKENIZER_FILES else list(TOKENIZER_FILES.values())
    if path.is_dir():
        check_folder(path, [*VOCABULARIES, *SETTINGS])
        for name in names:
            if (path / name).is_file():
                return path / name
        if kind == "auto" and (path / CONFIG_FILE).is_file():
            return path / CONFIG_FILE
        raise UserError(f"tokenizer_path={path} contains no {' or '.join(names)}")
    # Only the files that are read together with `path` are checked.
    check_folder(path.parent, [*(VOCABULARIES if path.name in VOCABULARIES else ()), *SETTINGS])
    if not path.is_file():
        raise UserError(
            f"tokenizer_path={path}: there is no such file; give a {', '.join(TOKENIZER_FILES.values())}, or a folder "
            "with one (names on a hub are not downloaded)"
        )
    return path


def _kind(file: Path) -> str:
    """Returns the type of a tokenizer's file, detected from the file's name and contents."""
    if file.name == CONFIG_FILE and says_bytes(file):
        return "bytes"
    if file.suffix == ".json":
        return "huggingface"
    with file.open("rb") as lines:
        first = lines.readline(1000).split()
    try:
        is_rank = len(first) == 2 and base64.b64decode(first[0], validate=True) and int(first[1]) == 0
    except (ValueError, binascii.Error):
        is_rank = False
    return "tiktoken" if is_rank else "sentencepiece"


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bounded(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(
                f"tokenizer_path: {file}, line {number}, is not base64, a space and a rank, as in a tiktoken file"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise UserError(f"tokenizer_path: {file}: the ranks are not 0 to {len(ranks) - 1}; the file may be cut short")
    return ranks


def _required(i: int, file: Path, key: str) -> int:
    if i < 0:
        raise UserError(f"tokenizer_path: {file} has no token for the end of a document; set {key}=false")
    return i


def _import(module: str, package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"this tokenizer needs {package}: pip install 'trainer[tokenizers]'") from error
