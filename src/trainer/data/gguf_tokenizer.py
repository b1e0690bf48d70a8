"""Converts the tokenizer in a GGUF file to the files of a Hugging Face tokenizer; see `tokenizer_files`."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.config.errors import UserError, shortened
from trainer.config.limits import PIECE_CHARACTERS, PIECES_CHARACTERS
from trainer.config.tokenizer_files import TEMPLATE_FILE, TEMPLATES, TOKENIZER_CONFIG, TOKENIZER_FILES, WITH_TOOLS
from trainer.config.words import visible
from trainer.leaves.gguf_file import GgufHeader
from trainer.models.gguf_words import WORDS

OWN = "tokenizer.ggml."  # the prefix of a tokenizer's keys in the file
KIND = f"{OWN}model"
TEMPLATE = "tokenizer.chat_template"
NO_TOKENIZER = "none"
BYTE_LEVEL, PIECES = "gpt2", "llama"  # the supported kinds: byte-level BPE, and sentencepiece's BPE
# GGUF's token types.
NORMAL, UNKNOWN, CONTROL, OWN_SYMBOL, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"  # sentencepiece's character for a space
ROLES = {
    f"{role}_token": f"{OWN}{name}_token_id"
    for role, name in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
}
MORE_ENDS = (f"{OWN}eot_token_id", f"{OWN}eom_token_id")  # the keys of further tokens that end a text
_OF_PIECES = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # the default ids for the kind PIECES
_ANOTHER = "; name another with tokenizer_path"


def special_ids(header: GgufHeader) -> dict[str, int]:
    """Returns a dict from the roles of special tokens (bos_token, eos_token, ...) to their ids.

    Raises:
      UserError: an id is not in the file's vocabulary.
    """
    own = _OF_PIECES if header.values.get(KIND) == PIECES else {}
    found = {role: header.get(key, int, own.get(role)) for role, key in ROLES.items()}
    count = len(header.get(f"{OWN}tokens", list, []))
    for role, token in found.items():
        if token is not None and role not in own and not 0 <= token < count:
            raise UserError(f"{header.path}: {ROLES[role]}={token}, but the file has {count} tokens")
    return {role: token for role, token in found.items() if token is not None and 0 <= token < count}


def begins(header: GgufHeader) -> bool:
    """Returns whether texts begin with bos_token."""
    kind, name = header.values.get(KIND), header.values.get(f"{OWN}pre")
    usual = kind == PIECES or (isinstance(name, str) and name in WORDS and WORDS[name].begins)
    return header.get(f"{OWN}add_bos_token", bool, usual)


def tokenizer_files(header: GgufHeader) -> dict[str, bytes]:
    """Returns a dict from the paths of tokenizer.json, tokenizer_config.json and the chat templates to their contents.

    Raises:
      UserError: the tokenizer is missing or damaged, or its kind is not supported.
    """
    kind = header.get(KIND, str, NO_TOKENIZER)
    if kind == NO_TOKENIZER:
        raise UserError(f"{header.path}: the file contains no tokenizer{_ANOTHER}")
    tokens = header.get(f"{OWN}tokens", list, [])
    kinds = header.get(f"{OWN}token_type", np.ndarray, np.full(len(tokens), NORMAL)).tolist()
    ids = {token: i for i, token in enumerate(tokens) if kinds[i : i + 1] != [UNUSED]}
    if not ids or len(kinds) != len(tokens) or len(ids) + kinds.count(UNUSED) != len(tokens):
        raise UserError(f"{header.path}: its tokenizer has no tokens, two equal tokens, or not one type for each token")
    special = {role: tokens[i] for role, i in special_ids(header).items() if tokens[i] in ids}
    if kind == BYTE_LEVEL:
        spec = _byte_level(header, ids)
    elif kind == PIECES:
        spec = _pieces(header, ids, kinds)
    else:
        raise UserError(
            f"{header.path}: {KIND}={shortened(visible(kind))}: tokenizers of this kind are not supported "
            f"(supported: {BYTE_LEVEL}, {PIECES}){_ANOTHER}"
        )
    begin = special.get("bos_token") if begins(header) else None
    marked = {**dict.fromkeys(special.values(), CONTROL), **{token: kinds[i] for token, i in ids.items()}}
    added = [token for token in ids if marked[token] in (CONTROL, UNKNOWN, OWN_SYMBOL)]
    spec |= {
        "added_tokens": [_added(token, ids[token], special=marked[token] != OWN_SYMBOL) for token in added],
        "post_processor": None if begin is None else _begin(begin, ids[begin]),
    }
    settings = {
        **special,
        "add_bos_token": begin is not None,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    found = {
        TOKENIZER_FILES["huggingface"]: json.dumps(spec | {"version": "1.0"}, ensure_ascii=False).encode(),
        TOKENIZER_CONFIG: json.dumps(settings, ensure_ascii=False, indent=2).encode(),
    }
    for key, file in ((TEMPLATE, TEMPLATE_FILE), (f"{TEMPLATE}.{WITH_TOOLS}", f"{TEMPLATES}/{WITH_TOOLS}.jinja")):
        if text := header.get(key, str):
            found[file] = text.encode()
    return found


def _byte_level(header: GgufHeader, ids: Mapping[str, int]) -> dict[str, Any]:
    name = header.get(f"{OWN}pre", str, "(none)")
    if name not in WORDS or header.get(f"{OWN}add_space_prefix", bool, False):
        what = "adds a space before texts" if name in WORDS else "is not known"
        raise UserError(
            f"{header.path}: {OWN}pre={shortened(visible(name))} {what}, so it is not known how its tokenizer "
            f"splits text (known: {', '.join(WORDS)}){_ANOTHER}"
        )
    words = WORDS[name]
    merges = [merge.partition(" ") for merge in header.get(f"{OWN}merges", list, [])]
    return {
        "normalizer": words.normalizer,
        "pre_tokenizer": words.pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            **{"type": "BPE", "vocab": dict(ids), "merges": [[left, right] for left, _, right in merges]},
            "ignore_merges": words.whole,
        },
    }


def _pieces(header: GgufHeader, ids: Mapping[str, int], kinds: Sequence[int]) -> dict[str, Any]:
    """Returns a tokenizer.json that merges like sentencepiece, which builds the token with the highest score first."""
    scores = header.get(f"{OWN}scores", np.ndarray, np.zeros(0)).tolist()
    if len(scores) != len(kinds):
        raise UserError(f"{header.path}: {len(scores)} scores, but {len(kinds)} tokens")
    mergeable = {token: scores[i] for token, i in ids.items() if kinds[i] in (NORMAL, OWN_SYMBOL)}
    prefix = header.get(f"{OWN}add_space_prefix", bool, True)
    to_spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    from_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = next((token for token, i in ids.items() if kinds[i] == UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, from_spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            **{"type": "BPE", "unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
            **{"vocab": dict(ids), "merges": merges_of(mergeable, ids, str(header.path))},
        },
    }


def merges_of(scores: Mapping[str, float], ids: Mapping[str, int], where: str) -> list[tuple[str, str]]:
    """Returns the merges of a BPE that builds tokens in the order of their scores, derived as in transformers.

    Raises:
      UserError: a token, or all tokens together, have more characters than in any published tokenizer.
    """
    if sum(map(len, scores)) > PIECES_CHARACTERS or max(map(len, scores), default=0) > PIECE_CHARACTERS:
        raise UserError(
            f"{where}: a token has more than {PIECE_CHARACTERS:,} characters, or all together {PIECES_CHARACTERS:,}"
        )
    by_score = defaultdict[float, list[tuple[str, str]]](list)
    for token, score in scores.items():
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in scores and cut[1] in scores]
        by_score[score] += sorted(known, key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    ordered = sorted(by_score.items(), reverse=True)
    return [cut for _, cuts in ordered for cut in sorted(cuts, key=lambda cut: tuple(map(len, cut)), reverse=True)]


def _added(token: str, i: int, *, special: bool) -> dict[str, Any]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": token, **off, "special": special}


def _begin(token: str, i: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    one, two = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, one],
        "pair": [first, one, two],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}},
    }
