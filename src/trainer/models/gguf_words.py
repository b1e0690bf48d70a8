"""How tokenizers in GGUF files split a text into words: the names in tokenizer.ggml.pre, and what they mean.

llama.cpp knows about 80 names (src/llama-vocab.cpp). Here are those of the families of this package, as the published
tokenizer.json of these models has them; tests/goldens/gguf_tokens.json has llama.cpp's tokens for each.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = _BYTES | {"use_regex": True}
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Splitting(NamedTuple):
    """
    Attributes:
      steps: the pre-tokenizers of a tokenizer.json.
      whole: whether a word that is a token is not built by merges.
      begins: whether a text begins with bos_token, unless the file says otherwise.
      normalizer: of the tokenizer.json. llama.cpp has none, and differs where it changes a text.
    """

    steps: list[dict[str, Any]]
    whole: bool = False
    begins: bool = False
    normalizer: dict[str, Any] | None = None

    @property
    def pre_tokenizer(self) -> dict[str, Any]:
        """As a tokenizer.json has it."""
        return self.steps[0] if len(self.steps) == 1 else {"type": "Sequence", "pretokenizers": self.steps}


def _split(pattern: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, _BYTES]


_LLAMA3 = _split(rf"{_START}|\p{{N}}{{1,3}}|{_END}")
_QWEN2 = _split(rf"{_START}|\p{{N}}|{_END}")
_DIGITS = [{"type": "Digits", "individual_digits": True}, _GPT2]
WORDS: Mapping[str, Splitting] = {
    **dict.fromkeys(("gpt-2", "olmo"), Splitting([_GPT2])),
    "smollm": Splitting(_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), Splitting(_LLAMA3, whole=True, begins=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Splitting(_LLAMA3)),
    "qwen2": Splitting(_QWEN2, normalizer={"type": "NFC"}),
    "deepseek-r1-qwen": Splitting(_QWEN2),
    "tekken": Splitting(_split(_TEKKEN), whole=True, begins=True),
}


def words_of(spec: Mapping[str, Any]) -> str | None:
    """Returns the name of the words of `spec`, a tokenizer.json; None if none of the names means them."""
    steps, whole = _steps(spec.get("pre_tokenizer")), bool(spec["model"].get("ignore_merges"))
    normalizer = spec.get("normalizer")
    if normalizer and normalizer.get("type") == "Sequence" and len(normalizer["normalizers"]) < 2:
        normalizer = next(iter(normalizer["normalizers"]), None)
    for name, words in WORDS.items():
        if (_steps(words.pre_tokenizer), words.whole, words.normalizer) == (steps, whole, normalizer):
            return name
    return None


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the steps, without what does not change the words."""
    given = pre_tokenizer or {}
    steps = given["pretokenizers"] if given.get("type") == "Sequence" else [given]
    return [{name: value for name, value in step.items() if name != "trim_offsets"} for step in steps]
