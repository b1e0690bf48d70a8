"""Parses values by the type of the key's default."""

import math
import re
from typing import Any

import yaml

from trainer.config.plain_yaml import Limit, check_tag, compose, construct, reason
from trainer.config.schema import Key

_TRUE = {"true", "yes", "on", "y", "t", "1"}
_FALSE = {"false", "no", "off", "n", "f", "0"}
NO_VALUE = {"", "none", "null", "~"}
_NULL_TAG = "tag:yaml.org,2002:null"


def read_text(key: Key, text: str) -> Any:
    """Returns the value of `key=text` on a command line.

    The value of a text key is `text` itself, except that enclosing YAML quotes are removed. Lists and dicts are written
    in YAML's flow style.

    Raises:
      ValueError: the text is not a value of the key's type; the message states the reason.
    """
    unquoted = _unquote(text)
    if key.kind not in (list, dict):
        return _scalar(key, unquoted)
    if unquoted != text:
        return read_node(key, yaml.ScalarNode("tag:yaml.org,2002:str", unquoted, style='"'))
    if text.strip()[:1] not in ("[", "{"):
        return read_node(key, yaml.ScalarNode("tag:yaml.org,2002:str", text.strip()))
    try:
        node = compose(text)
    except yaml.YAMLError as error:
        if isinstance(error, Limit):
            raise ValueError(reason(error)) from None
        raise ValueError(f"not valid YAML flow style ({reason(error)}); quotes may be missing") from None
    assert node is not None  # the text begins with a bracket
    return read_node(key, node)


def read_node(key: Key, node: yaml.Node) -> Any:
    """Returns the value of `key` in `node` of a YAML file. A scalar is parsed from its text, because YAML does not
    parse `1e-3` as a number.

    Raises:
      ValueError: the node is not a value of the key's type; the message states the reason.
    """
    check_tag(node)
    if key.kind is list:
        return _list(key, node)
    if key.kind is dict:
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("not a dict")
        return construct(node)
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"{'a list' if isinstance(node, yaml.SequenceNode) else 'a dict'} instead of a single value")
    return _scalar(key, "" if node.tag == _NULL_TAG else node.value)


def check(key: Key, value: Any) -> str | None:
    """Returns why `value`, which has the key's type, is not allowed; None if it is allowed."""
    if key.accepts(value):
        return None
    return "not one of the choices" if key.choices else "out of range"


def _scalar(key: Key, text: str) -> Any:
    word = text.strip().lower()
    if key.optional and word in NO_VALUE:
        return None
    if key.kind is str:
        return text
    if key.kind is bool:
        if word in _TRUE | _FALSE:
            return word in _TRUE
        raise ValueError("not true or false")
    return _number(key.kind, word)


def _number(kind: type, word: str) -> Any:
    try:
        if kind is int and re.fullmatch(r"[+-]?[0-9_]+", word):
            return int(word)  # not through float, which rounds beyond 2**53
        number = float(word)
    except ValueError:
        number = math.nan
    if kind is float and not math.isnan(number):
        return number
    if kind is int and number.is_integer():
        return int(number)
    noun = "an integer" if kind is int else "a number"
    raise ValueError(f"not {noun}" if word else f"empty, not {noun}")


def _list(key: Key, node: yaml.Node) -> list[Any] | None:
    if key.optional and isinstance(node, yaml.ScalarNode) and not node.style and node.value.lower() in NO_VALUE - {""}:
        return None
    if isinstance(node, yaml.ScalarNode) and key.item is str:
        if node.tag == _NULL_TAG or not node.value:
            return []
        if "," in node.value and not node.style:
            raise ValueError("several items without brackets")
        return [node.value]
    if not isinstance(node, yaml.SequenceNode):
        raise ValueError("not a list")
    if key.item is object:
        return construct(node)
    item = Key(key.name, None, key.item or str)
    return [_item(item, child) for child in node.value]


def _item(item: Key, node: yaml.Node) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("a list or dict inside the list")
    check_tag(node)
    return _scalar(item, node.value)


def _unquote(text: str) -> str:
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    if not quoted:
        return text
    try:
        node = compose(text)
    except yaml.YAMLError:
        return text
    return node.value if isinstance(node, yaml.ScalarNode) and node.style == text[0] else text
