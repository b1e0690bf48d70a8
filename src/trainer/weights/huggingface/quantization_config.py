"""Reads `quantization_config` of config.json: how a Hugging Face folder stores its quantized matrices."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from trainer.config.errors import shortened
from trainer.config.json_files import Field, field_problems, shown
from trainer.config.limits import GROUPS, PATTERN_CHARACTERS, PATTERNS, REPETITION_DIGITS

FIELDS = ("quantization_config", "compression_config")  # early versions of compressed-tensors write the second
ADVICE = "load the folder with transformers, dequantize the model and save it"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_METHODS = ("compressed-tensors", "fp8", "gptq", "awq", "mxfp4")
_LINEAR = "Linear"  # the class of a module; all matrices count as linear
_REGEX = "re:"
# A lookahead assertion at the start of a regular expression, and a token: an escape, a character class, or a character.
# `_closed` splits the expression into tokens to find the assertion's closing parenthesis.
_ASSERTION = re.compile(r"\^?\(\?([=!])")
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]|.", re.DOTALL)
_COUNT = re.compile(rf"\{{[\d,]*\d{{{REPETITION_DIGITS + 1}}}")
_MOST = 20  # the maximum number of lines in a message

Layout = Literal["packed", "plain", "inverse", "gptq", "awq"]
LessOne = Literal["", "each", "word"]
_BITS = Field(int, low=1, high=64)
_SIZE = Field(int, low=-1, null=True)
_NAMES = Field(list, null=True, item=str)
_OF_WEIGHTS = {
    **{"num_bits": _BITS, "type": Field(str), "symmetric": Field(bool), "dynamic": Field(bool)},
    **{"strategy": Field(str, null=True), "group_size": _SIZE},
    "block_structure": Field(list, null=True, item=int),
}
_OF_GROUP = {"weights": Field(dict, null=True), "targets": _NAMES, "format": Field(str, null=True)}
_OF_METHOD = {
    **{"quant_method": Field(str), "bits": _BITS, "group_size": _SIZE},
    **dict.fromkeys(("sym", "desc_act", "zero_point"), Field(bool, null=True)),
    **{"checkpoint_format": Field(str, null=True), "version": Field(str, null=True), "format": Field(str, null=True)},
    **{"fmt": Field(str, null=True), "config_groups": Field(dict), "ignore": _NAMES},
}


class Scheme(NamedTuple):
    """How a matrix [out, in] is stored.

    Attributes:
      kind: the type of the codes: "int4", "int8" or "fp8" (e4m3). int4 codes that occupy a byte each count as int8.
      block: the numbers of outputs and of inputs that share a scale; 0: all of them.
      layout: the names and the axis order of the matrix's tensors; see `trainer.weights.huggingface.packed`.
      zeros: whether zero points are required.
      less_one: how GPTQ subtracts 1 from stored zero points: "" not at all; "each": from each one separately; "word":
        in a single subtraction for all zero points of a word, in which a 0 borrows from the next zero point.
      symmetric: whether stored zero points must all be 0.
      ordered: whether the folder must contain the group of each input.
    """

    kind: str
    block: tuple[int, int]
    layout: Layout
    zeros: bool = False
    less_one: LessOne = ""
    symmetric: bool = False
    ordered: bool = False

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return 4 if self.kind == "int4" else 8

    @property
    def words(self) -> str:
        """The scheme in words, for messages."""
        match self.block:
            case 0, 0:
                return f"{self.kind} with one scale for each matrix"
            case 1, 0:
                return f"{self.kind} with a scale for each output"
            case 1, columns:
                return f"{self.kind} in groups of {columns}"
        return f"{self.kind} in blocks of {self.block[0]} x {self.block[1]}"


class Recipe(NamedTuple):
    """How a folder stores its matrices.

    Attributes:
      schemes: the scheme of each target. A target is one of the following: a module's name; "re:" followed by a regular
        expression for the beginning of modules' names; or "Linear", which matches all modules.
      ignore: the targets whose matrices are not quantized.
      activations: whether other programs also quantize activations for this folder.
      mxfp4: whether matrices of experts are stored as MXFP4; they are always read as floats.
    """

    schemes: Mapping[str, Scheme]
    ignore: Sequence[str] = ()
    activations: bool = False
    mxfp4: bool = False

    def schemes_of(self, modules: Sequence[str]) -> list[Scheme | None]:
        """Returns the scheme of each module; None if no target matches the module, or if the module is ignored. As in
        compressed-tensors, names take precedence over regular expressions, regular expressions over "Linear", and the
        alphabetically first regular expression over the others."""
        found = [self.schemes.get(_LINEAR)] * len(modules)
        for target in sorted(filter(_is_regex, self.schemes), reverse=True):
            for i in _matching(target, modules):
                found[i] = self.schemes[target]
        ignored = {i for target in filter(_is_regex, self.ignore) for i in _matching(target, modules)}
        names = set(self.ignore)
        if _LINEAR in names:
            return [None] * len(modules)
        return [
            None if i in ignored or module in names else self.schemes.get(module, found[i])
            for i, module in enumerate(modules)
        ]


def recipe(data: Mapping[str, Any], refused: list[str]) -> Recipe | None:
    """Returns how the folder with the config.json `data` stores its matrices; None if they are not quantized. Appends
    to `refused` a line for each value that cannot be read."""
    field = next((field for field in FIELDS if data.get(field)), None)
    if field is None:
        return None
    said = data[field]
    problems = field_problems(said, _OF_METHOD)
    method = said.get("quant_method", _METHODS[0] if field == FIELDS[1] else None)
    found = None
    if not problems and method in _METHODS:
        read = {"fp8": _fp8, "gptq": _gptq, "awq": _awq, "mxfp4": _mxfp4}.get(method, _compressed_tensors)
        found = read(said, problems)
    elif not problems:
        problems.append(f"quant_method={shown(method)} is not read (known: {', '.join(_METHODS)}); {ADVICE}")
    refused += [f"{field}: {line}" for line in problems[:_MOST]]
    return found


def _fp8(said: Mapping[str, Any], problems: list[str]) -> Recipe | None:
    """Reads the quantization of float8 (e4m3) folders like those of DeepSeek-V3 and Qwen3, which have one scale per
    block or per matrix."""
    if said.get("fmt") not in (None, "e4m3"):
        problems.append(f"fmt={shown(said['fmt'])} (known: e4m3)")
    if said.get("expert_dtype") not in (None, "fp8"):
        problems.append(f"expert_dtype={shown(said['expert_dtype'])} (known: fp8)")
    size = said.get("weight_block_size")
    block = (0, 0) if size is None else _block(size, problems, "weight_block_size")
    return Recipe({_LINEAR: Scheme("fp8", block, "inverse")}, activations=True)


def _mxfp4(said: Mapping[str, Any], problems: list[str]) -> Recipe | None:
    """Reads no fields, because the tensors' names show which matrices are MXFP4."""
    del said, problems
    return Recipe({}, mxfp4=True)


def _gptq(said: Mapping[str, Any], problems: list[str]) -> Recipe | None:
    """Reads GPTQ as AutoGPTQ and GPTQModel write it. In the format that stores zero points minus 1, AutoGPTQ subtracts
    1 from each zero point; GPTQModel subtracts 1 from all zero points of a word at once (`Scheme.less_one`)."""
    form = said.get("checkpoint_format") or said.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2") or said.get("is_marlin_format"):
        problems.append(f"checkpoint_format={shown(form)} of gptq (known: gptq, gptq_v2); {ADVICE}")
    if _overrides(said.get("dynamic")):
        problems.append(f"dynamic={shown(said['dynamic'])}: settings for single modules are not supported; {ADVICE}")
    meta = said.get("meta")
    writer = shown(meta.get("quantizer") if isinstance(meta, Mapping) else None)
    less_one: LessOne = "" if form == "gptq_v2" else "word" if "gptqmodel" in writer else "each"
    scheme = Scheme("int4", (1, 0), "gptq", True, less_one, bool(said.get("sym")), bool(said.get("desc_act")))
    return _of_groups(said, problems, scheme)


def _overrides(dynamic: Any) -> bool:
    """Returns whether GPTQModel's settings for single modules do more than exclude modules (prefix "-:")."""
    return bool(dynamic) and not (isinstance(dynamic, Mapping) and all(name.startswith("-:") for name in dynamic))


def _awq(said: Mapping[str, Any], problems: list[str]) -> Recipe | None:
    form = (said.get("version") or said.get("format") or "gemm").lower()
    if form != "gemm":
        problems.append(f"version={shown(form)} of awq (known: gemm); {ADVICE}")
    if said.get("bits", said.get("w_bit", 4)) != 4:
        problems.append(f"bits={shown(said.get('bits', said.get('w_bit')))} of awq (known: 4)")
    size, symmetric = said.get("group_size", said.get("q_group_size", 128)), said.get("zero_point") is False
    return _of_groups(
        {"bits": 4, "group_size": size}, problems, Scheme("int4", (1, 0), "awq", True, symmetric=symmetric)
    )


def _of_groups(said: Mapping[str, Any], problems: list[str], scheme: Scheme) -> Recipe | None:
    """Returns a recipe in which all matrices have `scheme` with the number of bits and the group size in `said`."""
    bits, size = said.get("bits"), said.get("group_size", -1)
    if bits not in (4, 8):
        problems.append(f"bits={shown(bits)} (known: 4, 8); {ADVICE}")
    if not isinstance(size, int) or size == 0 or size < -1:
        problems.append(f"group_size={shown(size)}, not a positive integer or -1")
        return None
    return Recipe({_LINEAR: scheme._replace(kind=f"int{bits}", block=(1, max(size, 0)))})


def _compressed_tensors(said: Mapping[str, Any], problems: list[str]) -> Recipe | None:
    sparsity = said.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") in (None, "dense")):
        problems.append(f"sparsity_config={shown(sparsity)}: sparse weights are not read; {ADVICE}")
    if said.get("transform_config"):
        problems.append(f"transform_config={shown(said['transform_config'])}: transformed weights are not read")
    schemes: dict[str, Scheme] = {}
    activations = False
    groups = said.get("config_groups") or {}
    if len(groups) > GROUPS:
        problems.append(f"{len(groups):,} config_groups, more than {GROUPS:,}")
    for name, group in itertools.islice(groups.items(), GROUPS):
        where = f"config_groups.{shortened(name)}"
        if not isinstance(group, Mapping):
            problems.append(f"{where}={shown(group)}, not an object")
        elif wrong := field_problems(group, _OF_GROUP) or field_problems(group.get("weights") or {}, _OF_WEIGHTS):
            problems += [f"{where}: {line}" for line in wrong]
        elif group.get("weights"):
            scheme = _scheme(group, group.get("format") or said.get("format") or "", problems, where)
            schemes |= dict.fromkeys(group.get("targets") or (), scheme)
            activations |= bool(group.get("input_activations"))
    ignore = said.get("ignore") or ()
    problems += _unusable([*schemes, *ignore])
    if not groups:
        problems.append("there are no config_groups")
    return Recipe(schemes, ignore, activations or bool(said.get("kv_cache_scheme")))


def _scheme(group: Mapping[str, Any], form: str, problems: list[str], where: str) -> Scheme:
    weights = group["weights"]
    bits, kind, size = weights.get("num_bits", 8), weights.get("type", "int").lower(), weights.get("group_size")
    strategy = (weights.get("strategy") or "").lower()
    strategy = strategy or ("tensor" if size is None else "group" if size > 0 else "channel")
    block = {"tensor": (0, 0), "channel": (1, 0)}.get(strategy, (1, 0))
    if form not in _FORMATS:
        problems.append(f"{where}: format={shown(form)} is not read (known: {', '.join(_FORMATS)}); {ADVICE}")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)) or weights.get("dynamic"):
        problems.append(f"{where}: weights of {bits} bits of type {shortened(kind)} (known: int 4, int 8, float 8)")
    elif form == _FORMATS[0] and kind != "int":
        problems.append(f"{where}: {form} with type={kind} (known: int)")
    if strategy == "group" and (size or 0) > 0:
        block = (1, size)
    elif strategy == "block":
        block = _block(weights.get("block_structure"), problems, f"{where}: block_structure")
    elif strategy not in ("tensor", "channel"):
        problems.append(f"{where}: strategy={shortened(strategy)} with group_size={size}")
    packed = form == _FORMATS[0]
    # With strategies other than group and channel, zero points are not packed and may be absent.
    symmetric = weights.get("symmetric", True)
    zeros = not symmetric and strategy in ("group", "channel")
    name = "fp8" if kind == "float" else f"int{bits}" if packed else "int8"
    ordered = weights.get("actorder") in (True, "group", "dynamic")  # all of these mean the same
    return Scheme(name, block, "packed" if packed else "plain", zeros, symmetric=symmetric, ordered=ordered)


def _block(said: Any, problems: list[str], name: str) -> tuple[int, int]:
    match said:
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
    problems.append(f"{name}={shown(said)}, not two positive integers")
    return 0, 0


def _unusable(targets: Sequence[str]) -> list[str]:
    """Returns a line for each regular expression in `targets` that is invalid or too large; one line if there are too
    many."""
    patterns = list(filter(_is_regex, targets))
    if len(patterns) > PATTERNS:
        return [f"{len(patterns):,} regular expressions, more than {PATTERNS}"]
    lines = []
    for target in patterns:
        if len(target) > PATTERN_CHARACTERS + len(_REGEX) or _COUNT.search(target):
            lines.append(
                f"target {shortened(target)}: more than {PATTERN_CHARACTERS} characters, or a repetition count of "
                f"more than {REPETITION_DIGITS} digits"
            )
            continue
        try:
            _matching(target, [""])
        except ValueError as error:
            where = "; (?=...) and (?!...) are allowed only at its beginning" if "perl operator" in str(error) else ""
            lines.append(f"target {shortened(target)}: {shortened(str(error))}{where}")
    return lines


def _is_regex(target: str) -> bool:
    return target.startswith(_REGEX)


def _matching(target: str, modules: Sequence[str]) -> list[int]:
    """Returns the indices of modules whose names begin with a match of the regular expression `target`.

    A file of the folder contains the expression, so it is matched with Arrow's RE2, which always takes linear time. RE2
    has no lookahead assertions; those at the beginning of the expression are matched separately.

    Raises:
      ValueError: the expression is invalid.
    """
    import pyarrow
    import pyarrow.compute

    names = pyarrow.array([name.encode(errors="replace").decode() for name in modules], pyarrow.string())

    def matches(pattern: str) -> np.ndarray:
        found = pyarrow.compute.match_substring_regex(names, pattern=f"^(?:{pattern})")
        return np.asarray(found.to_numpy(zero_copy_only=False), bool)

    pattern, wanted = target.removeprefix(_REGEX), np.ones(len(modules), bool)
    while assertion := _ASSERTION.match(pattern):
        inner, pattern = _closed(pattern, assertion.end())
        wanted &= matches(inner) == (assertion[1] == "=")
    return np.flatnonzero(wanted & matches(pattern)).tolist()


def _closed(pattern: str, start: int) -> tuple[str, str]:
    """Returns the content of an assertion, from `start` to its closing parenthesis, and the text after the parenthesis.

    Raises:
      ValueError: the parenthesis is missing, or the assertion is part of an alternative.
    """
    depth, end = 1, -1
    for token in _TOKEN.finditer(pattern, start):
        depth += (token[0] == "(") - (token[0] == ")")
        if end < 0 and depth == 0:
            end = token.start()
        if depth == 0 and token[0] == "|":
            raise ValueError("alternatives next to an assertion: put them in parentheses")
    if end < 0:
        raise ValueError("missing )")
    return pattern[start:end], pattern[end + 1 :]
