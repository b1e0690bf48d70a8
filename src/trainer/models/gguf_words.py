"""How tokenizers in GGUF files split text into words, within which they merge bytes into tokens.

The GGUF field tokenizer.ggml.pre contains a name that determines the splitting. llama.cpp defines about 80 names
(src/llama-vocab.cpp). `WORDS` contains the names that this package's families use, with the pre-tokenizers of the
models' published tokenizer.json. tests/goldens/gguf_tokens.json contains llama.cpp's tokens for each of these names.
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
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters with an upper and a lower case, as listed in DeepSeek-V2's tokenizer.
_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-"
    "\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80"
    "-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


class Splitting(NamedTuple):
    """How a tokenizer splits text into words, and related settings.

    Attributes:
      steps: the pre-tokenizers of a tokenizer.json.
      whole: whether a word that is in the vocabulary becomes one token, without merges.
      begins: whether a text begins with bos_token, unless the GGUF file's add_bos_token overrides this.
      normalizer: the normalizer of the tokenizer.json. llama.cpp has no normalizer, so its tokens differ from this
        trainer's if the normalizer changes a text.
    """

    steps: list[dict[str, Any]]
    whole: bool = False
    begins: bool = False
    normalizer: dict[str, Any] | None = None

    @property
    def pre_tokenizer(self) -> dict[str, Any]:
        """The value of the key pre_tokenizer in a tokenizer.json."""
        return self.steps[0] if len(self.steps) == 1 else {"type": "Sequence", "pretokenizers": self.steps}


def _split(*patterns: str) -> list[dict[str, Any]]:
    own = {"behavior": "Isolated", "invert": False}
    return [*({"type": "Split", "pattern": {"Regex": each}, **own} for each in patterns), _BYTES]


_LLAMA3 = _split(rf"{_START}|\p{{N}}{{1,3}}|{_END}")
_QWEN2 = _split(rf"{_START}|\p{{N}}|{_END}")
_DIGITS = [{"type": "Digits", "individual_digits": True}, _GPT2]
_DEEPSEEK = _split(  # of DeepSeek-V2
    *("[\r\n]", rf"\s?[{_LETTERS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    *(r"\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
)
_DEEPSEEK3 = _split(
    *(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
WORDS: Mapping[str, Splitting] = {
    **dict.fromkeys(("gpt-2", "olmo"), Splitting([_GPT2])),
    **dict.fromkeys(("smollm", "refact"), Splitting(_DIGITS)),  # Granite uses refact
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), Splitting(_LLAMA3, whole=True, begins=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Splitting(_LLAMA3)),
    "qwen2": Splitting(_QWEN2, normalizer={"type": "NFC"}),
    "deepseek-r1-qwen": Splitting(_QWEN2),
    "deepseek-llm": Splitting([*_DEEPSEEK[:-1], _DIGITS[0], _BYTES]),
    "deepseek-v3": Splitting(_DEEPSEEK3),
    "gpt-4o": Splitting(_split(_O200K)),  # gpt-oss uses gpt-4o
    # transformers converted this tokenizer from tiktoken. llama.cpp splits text as for gpt-4o.
    "llama4": Splitting(_split(_O200K), whole=True),
    "tekken": Splitting(_split(_TEKKEN), whole=True, begins=True),
}


def words_of(spec: Mapping[str, Any]) -> str | None:
    """Returns the first name in `WORDS` with the same splitting as `spec`, the content of a tokenizer.json; None if no
    name has it."""
    steps, whole = _steps(spec.get("pre_tokenizer")), bool(spec["model"].get("ignore_merges"))
    normalizer = spec.get("normalizer")
    if normalizer and normalizer.get("type") == "Sequence" and len(normalizer["normalizers"]) < 2:
        normalizer = next(iter(normalizer["normalizers"]), None)
    for name, words in WORDS.items():
        if (_steps(words.pre_tokenizer), words.whole, words.normalizer) == (steps, whole, normalizer):
            return name
    return None


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the steps of `pre_tokenizer`, without settings that do not affect how text is split."""
    given = pre_tokenizer or {}
    steps = given["pretokenizers"] if given.get("type") == "Sequence" else [given]
    plain = [{name: value for name, value in step.items() if name != "trim_offsets"} for step in steps]
    return [step | {"pattern": _escaped(step["pattern"])} if "pattern" in step else step for step in plain]


def _escaped(pattern: Mapping[str, str]) -> dict[str, str]:
    """Returns `pattern` with line breaks escaped. Patterns are compared as text, but only some files escape them."""
    return {kind: text.replace("\r", r"\r").replace("\n", r"\n") for kind, text in pattern.items()}
