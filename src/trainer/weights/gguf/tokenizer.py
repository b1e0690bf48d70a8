"""Converts a tokenizer to the fields of a GGUF file; the inverse of `data.gguf_tokenizer`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.errors import UserError, shortened
from trainer.config.tokenizer_files import TOKENIZER_FILES, WITH_TOOLS, has_tokenizer
from trainer.data.gguf_tokenizer import (
    BYTE,
    BYTE_LEVEL,
    CONTROL,
    KIND,
    MORE_ENDS,
    NO_TOKENIZER,
    NORMAL,
    OWN,
    OWN_SYMBOL,
    PIECES,
    ROLES,
    TEMPLATE,
    UNKNOWN,
    UNUSED,
    merges_of,
    tokenizer_files,
)
from trainer.data.tokenizer import BYTE as BYTE_NAME
from trainer.data.tokenizer import JSON_FILE, JsonTokenizer
from trainer.data.tokenizer_files import load_tokenizer
from trainer.leaves.about import About
from trainer.leaves.gguf_file import GgufHeader
from trainer.models.gguf_words import WORDS, words_of

_OF_PIECES = ("Prepend", "Metaspace", "Replace", "Split")  # the steps of tokenizers converted from sentencepiece
# A text in ten scripts, with which two tokenizers are compared.
_SAMPLE = (
    " It's   12345 + 6.78e-9 items,\tHe'LL say:\r\n\n  \u201cna\u00efve caf\u00e9\u201d <|x|> </s>; "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0394\u03ad\u03bb\u03c4\u03b1 \u05e9\u05dc\u05d5\u05dd "
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \u4f60\u597d \u3053\u3093\u306b "
    "\uc548\ub155 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \U0001f642\U0001f1eb\U0001f1ee  ___== "
)


def tokenizer_values(place: Path, about: About, rows: int, say: Callable[[str], Any] = print) -> dict[str, Any]:
    """Returns the GGUF keys and values of the tokenizer at `place`, a folder or a GGUF file.

    Args:
      about: the model's metadata, including the tokens that end a text.
      rows: the vocabulary size of the model, which may exceed the tokenizer's. llama.cpp requires a name for each of
        the model's tokens.
      say: receives a line if something cannot be written.

    Raises:
      UserError: GGUF cannot represent this tokenizer.
    """
    if not has_tokenizer(place, "auto"):
        say(f"{place}: there is no tokenizer, so the GGUF file has none, and llama.cpp accepts only token ids")
        return {KIND: NO_TOKENIZER}
    tokenizer = load_tokenizer(str(place), "auto", add_bos=True, add_eos=True)
    if not isinstance(tokenizer, JsonTokenizer):
        raise UserError(
            f"{place}: format=gguf writes only tokenizers with a {JSON_FILE}, not one of type "
            f"{type(tokenizer).__name__.removesuffix('Tokenizer').lower()}"
        )
    spec = json.loads(tokenizer.saved_files()[JSON_FILE])
    added = {token["content"]: token for token in spec["added_tokens"]}
    ids = {**spec["model"]["vocab"], **{name: token["id"] for name, token in added.items()}}
    own = _byte_level(spec, place) if spec["model"].get("type") == "BPE" and _is_byte_level(spec) else None
    special = {role: ids[name] for role, name in tokenizer.special_names.items() if role in ROLES and name in ids}
    names, kinds = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for name, i in ids.items():
        if i < rows:
            names[i], kinds[i] = name, NORMAL
            if name in added:
                kinds[i] = CONTROL if added[name]["special"] else OWN_SYMBOL
    if own is None:
        own = _pieces(spec, names, kinds, place)
    ends = [token for token in dict.fromkeys([special.get("eos_token"), *about.ends]) if token is not None]
    if len(ends) > 1 + len(MORE_ENDS):
        say(f"a GGUF file can store only {ends[: 1 + len(MORE_ENDS)]} of the tokens that end a text, {ends}")
    found = {
        **own,
        f"{OWN}tokens": names,
        f"{OWN}token_type": kinds,
        **{ROLES[role]: i for role, i in special.items() if i < rows},
        **dict(zip([ROLES["eos_token"], *MORE_ENDS], ends, strict=False)),
        f"{OWN}add_bos_token": bool(tokenizer.before_text),
        f"{OWN}add_eos_token": False,
    }
    _check(found, tokenizer, place)
    if template := tokenizer.chat_template:
        found[TEMPLATE] = template.text
        if template.with_tools:
            found |= {f"{TEMPLATE}s": [WITH_TOOLS], f"{TEMPLATE}.{WITH_TOOLS}": template.with_tools}
    return found


def _is_byte_level(spec: Mapping[str, Any]) -> bool:
    return (spec.get("decoder") or {}).get("type") == "ByteLevel"


def _byte_level(spec: Mapping[str, Any], place: Path) -> dict[str, Any]:
    if (name := words_of(spec)) is None:
        what = shortened(json.dumps(spec.get("pre_tokenizer")))
        raise UserError(
            f"{place}: its tokenizer splits texts into words in an unsupported way ({what}); supported: "
            f"{', '.join(WORDS)}"
        )
    merges = [it if isinstance(it, str) else " ".join(it) for it in spec["model"]["merges"]]
    return {KIND: BYTE_LEVEL, f"{OWN}pre": name, f"{OWN}merges": merges}


def _pieces(spec: Mapping[str, Any], names: list[str], kinds: list[int], place: Path) -> dict[str, Any]:
    """Returns the values of a tokenizer that was converted from a sentencepiece model. Updates `kinds` in place."""
    model, normalizer = spec["model"], spec.get("normalizer") or {}
    steps = [*normalizer.get("normalizers", [normalizer]), spec.get("pre_tokenizer") or {}]
    first = [it for it in steps if it.get("type") in ("Prepend", "Metaspace")]
    other = [it["type"] for it in steps if it.get("type", "Replace") not in _OF_PIECES]
    if model.get("type") != "BPE" or not model.get("byte_fallback") or other:
        raise UserError(
            f"{place}: format=gguf writes byte-level BPE, and sentencepiece's BPE with byte_fallback; this "
            f"tokenizer is {shortened(' '.join([model.get('type', 'another model'), *other]))}"
        )
    for i, name in enumerate(names):
        if name == model.get("unk_token"):
            kinds[i] = UNKNOWN
        elif BYTE_NAME.fullmatch(name) and kinds[i] == NORMAL:
            kinds[i] = BYTE
    pairs = [tuple(it.split(" ", 1)) if isinstance(it, str) else tuple(it) for it in model["merges"]]
    ranks = {token: i for i, token in enumerate(dict.fromkeys(left + right for left, right in pairs))}
    scores = {
        name: -float(ranks.get(name, len(ranks)))
        for name, kind in zip(names, kinds, strict=True)
        if kind in (NORMAL, OWN_SYMBOL)
    }
    again = merges_of(scores, model["vocab"], str(place))
    if sorted(again) != sorted(pairs) or [*dict.fromkeys(a + b for a, b in again)] != [*ranks]:
        raise UserError(f"{place}: its merges cannot be derived from scores of its tokens, which GGUF stores instead")
    prefix = any(it.get("prepend_scheme", "first") != "never" for it in first)
    return {
        KIND: PIECES,
        f"{OWN}pre": "default",
        f"{OWN}scores": np.array([scores.get(name, 0.0) for name in names], np.float32),
        f"{OWN}add_space_prefix": prefix,
    }


def _check(values: Mapping[str, Any], tokenizer: JsonTokenizer, place: Path) -> None:
    """Checks that `tokenizer` and the tokenizer read back from `values` encode a sample text identically."""
    import tokenizers

    held = {**values, f"{OWN}token_type": np.array(values[f"{OWN}token_type"], np.int32)}
    again = tokenizers.Tokenizer.from_str(
        tokenizer_files(GgufHeader(place, held, {}, 0))[TOKENIZER_FILES["huggingface"]].decode()
    )
    again.encode_special_tokens = True
    if again.encode(_SAMPLE, add_special_tokens=False).ids != tokenizer.encode(_SAMPLE):
        raise UserError(
            f"{place}: llama.cpp's tokenizer of this kind yields other tokens, so format=gguf cannot represent it"
        )
