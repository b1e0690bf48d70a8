"""Reads the arguments of a command line, and the environment variables that can replace them."""

import functools
import re
from collections.abc import Mapping, Sequence

from trainer.config.environment import variables, without_prefix
from trainer.config.errors import shortened
from trainer.config.files import ENVIRONMENT, YML_ENDINGS
from trainer.config.paths import is_file
from trainer.config.reader import Reader, Setting
from trainer.config.values import read_text


def split(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Returns the yml that the first argument names (default: base.yml), and the other arguments."""
    first = argv[0] if argv else ""
    looks_like_yml = first.endswith(YML_ENDINGS) and ("=" not in first or is_file(first))
    if looks_like_yml or ("=" not in first and not first.startswith("-") and is_file(first)):
        return first, argv[1:]
    return "base.yml", argv


def read_words(reader: Reader, words: Sequence[str], source: str) -> dict[str, Setting]:
    """Returns the settings of `words`, arguments of the form KEY=TEXT. Messages name `source` as their origin."""
    settings: dict[str, Setting] = {}
    for word in words:
        name, equals, text = word.partition("=")
        problem = malformed(reader, name, bool(equals), text)
        if problem:
            reader.mistakes.append(f"{shortened(word)} ({source}): {problem}")
        else:
            settings |= reader.setting(name, text, source, functools.partial(read_text, text=text))
    return settings


def read_by_hand(
    reader: Reader, words: Sequence[str], source: str, environment: Mapping[str, str]
) -> tuple[dict[str, Setting], list[str]]:
    """Returns the settings of the command line and the environment, and warnings about ignored variables."""
    settings = read_words(reader, words, source)
    texts = dict(word.partition("=")[::2] for word in words)
    given, unknown = variables(environment)
    unknown += without_prefix(environment, texts.keys() | given.keys())
    for name, (variable, text) in given.items():
        read = functools.partial(read_text, text=text)
        ours = reader.setting(name, text, ENVIRONMENT + variable, read)
        both_read = name in settings and name in ours
        differ = settings[name].value != ours[name].value if both_read else text != texts.get(name, text)
        if differ:
            reader.mistakes.append(
                f"{name}={shortened(texts[name])} ({source}) and {variable}={shortened(text)} (environment): two "
                "values for one key; give one of them"
            )
        settings = ours | settings
    return settings, unknown


def malformed(reader: Reader, name: str, has_value: bool, text: str) -> str | None:
    """Returns what is wrong with the argument NAME or NAME=TEXT; None if it has the form key=value."""
    keys = reader.schema.keys
    bare = name.lstrip("-").replace("-", "_")
    if re.match("base_config(:|$)", bare):
        return "base_config belongs in a yml; on the command line the first argument names the yml"
    if name.startswith("-"):
        if bare not in keys:
            return f"unknown option; keys are written key=value, --help lists them{reader.nearest_key(bare)}"
        return f"keys have no dashes; write {bare}={shortened(text) if has_value else 'VALUE'}"
    if has_value:
        return None
    if name.endswith(YML_ENDINGS):
        return "only the first argument may be a yml; a yml names its parent with `base_config:`"
    return f"no value; write {name}=VALUE" if name in keys else f"not key=value{reader.nearest_key(name)}"
