"""Reads YAML within limits, so that a small untrusted text cannot expand to a large value.

All YAML from users and folders is read with this module. The exception for an exceeded limit is `Limit`, which is a
`yaml.YAMLError`, like the exception for a syntax error.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.config.schema import LOADER

# For comparison: base.yml, the longest file of keys, has 30,000 characters, 900 nodes and a depth of 4.
MAX_LENGTH = 1 << 18  # the most characters in a text, and in its nodes once aliases and merge keys are expanded
MAX_DEPTH = 24
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}


class Limit(yaml.MarkedYAMLError):
    """Raised if a text exceeds a limit of this module, even if the text is valid YAML."""


def read_text(path: Path) -> str:
    """Returns the text of a YAML file.

    Raises:
      OSError: the file cannot be read.
      UnicodeDecodeError: it is not UTF-8.
      Limit: it is too long.
    """
    with path.open("rb") as file:
        # A character has at most four bytes.
        data = file.read(4 * MAX_LENGTH + 1)
    if len(data) > 4 * MAX_LENGTH:
        raise _limit(f"more than {MAX_LENGTH} characters", None)
    return data.decode("utf-8")


def compose(text: str) -> yaml.Node | None:
    """Returns the root node of `text`; None if it is empty. Does not expand merge keys (`<<`); see `flatten`.

    Raises:
      yaml.YAMLError: `text` is not YAML, or exceeds a limit.
    """
    if len(text) > MAX_LENGTH:
        raise _limit(f"more than {MAX_LENGTH} characters", None)
    _check_limits(text)
    return yaml.compose(text, Loader=LOADER)


def flatten(node: yaml.MappingNode) -> None:
    """Expands the merge keys (`<<`) of `node` in place."""
    yaml.SafeLoader("").flatten_mapping(node)


def construct(node: yaml.Node) -> Any:
    """Returns the value of `node` (from `compose`): None, a bool, a number, text, a list or a dict.

    Raises:
      ValueError: a node has the tag of another type, such as a date, or a value that does not fit its tag.
    """
    for child in _walk(node):
        if child.tag not in _PLAIN_TAGS or (isinstance(child, yaml.ScalarNode) and not _fits(child)):
            raise _not_plain(child)
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except yaml.YAMLError as error:
        raise ValueError(f"not plain YAML ({getattr(error, 'problem', error)})") from None
    except ValueError:  # int() rejects numbers with thousands of digits
        raise ValueError("not plain YAML (an integer with thousands of digits)") from None


def check_tag(node: yaml.Node) -> None:
    """Checks that `node` has no explicit tag outside plain YAML, such as !!binary.

    An implicit tag is allowed, for example the timestamp tag of 2001-01-01.

    Raises:
      ValueError: `node` has such an explicit tag.
    """
    if node.tag not in _PLAIN_TAGS and not (isinstance(node, yaml.ScalarNode) and _fits(node)):
        raise _not_plain(node)


def reason(error: yaml.YAMLError) -> str:
    """Returns the problem that `error` describes, on one line and without the position."""
    return getattr(error, "problem", None) or " ".join(str(error).split())


def describe(error: yaml.YAMLError, where: str) -> str:
    """Returns a message: the name `where` of the file, the line number if it is known, and the problem."""
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark else ""
    return f"{where}{line}: {'' if isinstance(error, Limit) else 'not YAML: '}{reason(error)}"


def repeated_keys(node: yaml.MappingNode) -> dict[str, list[int]]:
    """Returns a dict from each key that occurs more than once in `node` to the numbers of its lines. Call this function
    before `flatten`, which may repeat keys."""
    lines: dict[str, list[int]] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            lines.setdefault(key.value, []).append(key.start_mark.line + 1)
    return {key: numbers for key, numbers in lines.items() if len(numbers) > 1}


def _check_limits(text: str) -> None:
    """Checks the size and depth of the document from the parser's events, without composing its nodes."""
    anchors: dict[str | None, tuple[int, int] | None] = {}  # each anchor's (length, depth); None until its node ends
    open_nodes: list[tuple[str | None, int, int]] = []  # nodes not yet ended: (anchor, length and depth so far)

    def add(length: int, depth: int, mark: Any) -> None:
        if not open_nodes:
            return
        anchor, old_length, old_depth = open_nodes[-1]
        length, depth = old_length + length, max(old_depth, depth + 1)
        if length > MAX_LENGTH:
            raise _limit(f"more than {MAX_LENGTH} characters once its aliases are expanded", mark)
        if len(open_nodes) + depth - 1 > MAX_DEPTH:
            raise _limit(f"nested deeper than {MAX_DEPTH}", mark)
        open_nodes[-1] = anchor, length, depth

    for event in _events(text):
        mark = event.start_mark
        if isinstance(event, yaml.CollectionStartEvent):
            if len(open_nodes) >= MAX_DEPTH:
                raise _limit(f"nested deeper than {MAX_DEPTH}", mark)
            open_nodes.append((event.anchor, 1, 1))
            if event.anchor is not None:
                anchors[event.anchor] = None
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, length, depth = open_nodes.pop()
            if anchor is not None:
                anchors[anchor] = length, depth
            add(length, depth, mark)
        elif isinstance(event, yaml.ScalarEvent):
            if event.anchor is not None:
                anchors[event.anchor] = len(event.value) + 1, 1
            add(len(event.value) + 1, 1, mark)
        elif isinstance(event, yaml.AliasEvent):
            # An alias without an anchor passes this check; the composer reports it.
            size = anchors.get(event.anchor, (0, 0))
            if size is None:
                raise _limit(f"the alias *{event.anchor} is inside its own anchor", mark)
            add(*size, mark)


def _events(text: str) -> Iterator[yaml.Event]:
    """Yields the parser's events. libyaml reads ahead, so its own nesting limit (since PyYAML 6.0.4) may be exceeded
    before ours is; the error is then the same as for our limit."""
    try:
        yield from yaml.parse(text, Loader=LOADER)
    except yaml.MarkedYAMLError as error:
        if "maximum nesting depth" in reason(error):
            raise _limit(f"nested deeper than {MAX_DEPTH}", error.problem_mark) from None
        raise


def _limit(problem: str, mark: Any) -> Limit:
    return Limit(None, None, problem, mark)


def _not_plain(node: yaml.Node) -> ValueError:
    where = f", line {node.start_mark.line + 1}" if node.start_mark else ""
    return ValueError(f"not plain YAML ({node.tag.removeprefix(_TAG)}{where})")


def _walk(node: yaml.Node) -> Iterator[yaml.Node]:
    yield node
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _walk(child)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _walk(key)
            yield from _walk(value)


def _fits(node: yaml.ScalarNode) -> bool:
    """Returns whether a scalar's text fits the type of its tag. In `!!int x` and `!!bool 3`, it does not."""
    if node.tag == f"{_TAG}str":
        return True
    return not node.style and yaml.SafeLoader("").resolve(yaml.ScalarNode, node.value, (True, False)) == node.tag
