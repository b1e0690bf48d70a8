"""Reads conversations from records.

A record has a column of messages, the columns of a prompt and its completion, or the columns of a prompt and two
answers. Other records can be converted by a function that the user supplies (see `Formatter`).
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from trainer.chat.template import MARKS
from trainer.config.capabilities.chat_keys import TOOLS
from trainer.config.errors import UserError, nearest, shortened
from trainer.config.json_files import parsed, read_object
from trainer.config.paths import local_path
from trainer.data.documents import Record, text_of
from trainer.data.functions import failure, load_function, source_hash
from trainer.data.text import mended

Message = dict[str, Any]
# ShareGPT's names for roles.
_SHARED = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_MARKS = re.compile(f"[{MARKS}]")
# The sets of columns that the user's formatting function may return for a conversation and for a pair of answers.
_CONVERSATION = (("messages",), ("prompt", "completion"))
_PREFERENCE = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
_HINT = "convert the data, or let your function convert them: formatting_func_path=package.module:function"


class Conversation(NamedTuple):
    """Messages, and the tools that a template describes to the model. `tools` is None for a conversation without
    tools."""

    messages: list[Message]
    tools: Any = None


class Preference(NamedTuple):
    """Two answers to a prompt, each a complete conversation or text that includes the prompt.

    `prompt` is the number of messages in the prompt; 0 for texts. If the prompt or an answer in the record is empty,
    both `chosen` and `rejected` are empty.
    """

    chosen: list[Message] | str = ""
    rejected: list[Message] | str = ""
    prompt: int = 0
    tools: Any = None


@dataclass(frozen=True)
class Formatter:
    """A function of the user that converts records: it receives a dict of columns and returns another such dict, for
    example {"messages": ...}.

    Attributes:
      path: package.module:function, or package.module.function as in MaxText.
      kwargs: further arguments of the function. If they contain `template_path`, the path of a JSON file, the function
        gets the file's JSON object as `template_config` instead.
    """

    path: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """The function. Raises UserError if it cannot be imported."""
        try:
            return load_function(self.path)
        except ImportError as error:
            raise UserError(f"formatting_func_path={self.path}: {error}") from error

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """The function's further arguments, with `template_config` instead of `template_path`."""
        given = dict(self.kwargs)
        if path := given.pop("template_path", None):
            given["template_config"] = read_object(local_path(str(path), "formatting_func_kwargs: template_path="))
        return given

    def load(self) -> None:
        """Raises UserError if the function or the file at template_path cannot be read."""
        _ = self.function, self.arguments

    @property
    def identity(self) -> Any:
        """A JSON-compatible value that changes if the function's path, arguments or source file change."""
        return [self.path, repr(self.arguments), source_hash(self.function)]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "kwargs": self.kwargs}


def conversation(record: Record, columns: Sequence[str], formatter: Formatter | None) -> tuple[Conversation, int]:
    """Returns the conversation of a record and the number of replaced characters.

    The conversation has no messages if the record has none, or if the record's prompt or completion is empty. The
    replaced characters are lone surrogates and the Unicode noncharacters with which `chat.template` marks text. Their
    replacement is U+FFFD.

    Raises:
      UserError: the record contains no conversation. The error names the record and describes its content.
    """
    reader, named = _Reader(record), dict(zip(columns, record.values, strict=True))
    if formatter is not None:
        named = reader.formatted(named, formatter, _CONVERSATION)
    tools = reader.listed(named.pop(TOOLS, None), TOOLS)
    if len(named) == 1:
        ((column, value),) = named.items()
        messages = reader.messages(value, column)
    else:
        pairs = zip(named.items(), ("user", "assistant"), strict=True)
        sides = [reader.side(value, column, role) for (column, value), role in pairs]
        messages = [message for side in sides for message in side] if all(sides) else []
    return Conversation(messages, tools or None), reader.replaced


def preference(record: Record, columns: Sequence[str], formatter: Formatter | None) -> tuple[Preference, int]:
    """Returns the two answers of a record, and the number of replaced characters (see `conversation`).

    If the record has a prompt, its answers may repeat the prompt. Otherwise, the prompt is the common beginning of both
    answers. If the answers are lists of messages, the prompt never includes the last message of an answer.

    Raises:
      UserError: the record contains no pair. The error names the record and describes its content.
    """
    reader, named = _Reader(record), dict(zip(columns, record.values, strict=True))
    if formatter is not None:
        named = reader.formatted(named, formatter, _PREFERENCE)
    tools = reader.listed(named.pop(TOOLS, None), TOOLS) or None
    *asked, chosen, rejected = ((column, reader.said(value, column)) for column, value in named.items())
    if not all(value for _, value in (*asked, chosen, rejected)):
        return Preference(), reader.replaced
    of_text = [isinstance(value, str) for _, value in (chosen, rejected)]
    if not asked and all(of_text):
        return Preference(chosen[1], rejected[1], tools=tools), reader.replaced
    if not asked and any(of_text):
        raise reader.error(f"one of the columns {chosen[0]} and {rejected[0]} holds text, the other messages")
    one, other = (reader.spoken(value, "assistant") for _, value in (chosen, rejected))
    if not asked:
        most = min(len(one), len(other)) - 1
        prompt = next((i for i in range(most) if one[i] != other[i]), most)
        return Preference(one, other, prompt, tools), reader.replaced
    ((column, value),) = asked
    messages = reader.spoken(value, "user")
    if not all(side[: len(messages)] == messages and len(side) > len(messages) for side in (one, other)):
        for name, side in ((chosen[0], one), (rejected[0], other)):
            if (role := side[0]["role"]) in ("user", "system"):
                raise reader.error(
                    f"column {name} begins with a message of the {role}, but not with the prompt in column {column}; "
                    f"leave out column {column}, or give only answers in the other columns"
                )
        one, other = [*messages, *one], [*messages, *other]
    return Preference(one, other, len(messages), tools), reader.replaced


class _Reader:
    def __init__(self, record: Record):
        self.record, self.replaced = record, 0

    def formatted(
        self, named: dict[str, Any], formatter: Formatter, forms: Sequence[tuple[str, ...]]
    ) -> dict[str, Any]:
        """Returns the columns that the user's function returns for a record. They must include all columns of one of
        `forms`."""
        function, arguments = formatter.function, formatter.arguments
        try:
            result = function(named, **arguments)
        except Exception as error:  # the function can raise any exception
            raise self.error(f"{formatter.path} failed: {failure(error)}") from error
        if not isinstance(result, Mapping):
            result = {"messages": result}
        must = ", or with ".join(" and ".join(names) for names in forms)
        for names in forms:
            if all(name in result for name in names):
                return {name: result[name] for name in (*names, TOOLS) if name in result}
        raise self.error(
            f"{formatter.path} returned {', '.join(map(str, result)) or 'nothing'}; it must return a dict with {must}"
        )

    def side(self, value: Any, column: str, role: str) -> list[Message]:
        """Returns the messages of the prompt or completion `value`; [] if it is empty."""
        value = _value(value)
        if not isinstance(value, str | bytes) and value is not None:
            return self.messages(value, column)
        return self.spoken(self.text(value, column), role)

    def said(self, value: Any, column: str) -> str | list[Message]:
        """Returns the text or the list of messages in `value`. If the text is JSON of messages, returns these
        messages."""
        value = _value(value)
        text = self.text(value, column) if isinstance(value, str | bytes | None) else ""
        is_text = isinstance(value, str | bytes | None) and not (text.startswith("[") and _is_of_messages(text))
        return text if is_text else self.messages(value, column)

    def text(self, value: str | bytes | None, column: str) -> str:
        """Returns `value` as text, in which invalid characters are replaced."""
        text, replaced = text_of(value, column, self.record)
        self.replaced += replaced
        return text

    def spoken(self, said: str | list[Message], role: str) -> list[Message]:
        """Returns `said` unchanged if it is a list of messages. If it is text, returns a list with one message with
        this text and the given role; [] if the text is empty."""
        if not isinstance(said, str):
            return said
        return [{"role": role, "content": self.clean(said)}] if said else []

    def messages(self, value: Any, column: str) -> list[Message]:
        """Returns the messages in a list, or in the JSON text of such a list."""
        found = self.listed(value, column)
        return [self.message(one, f"{column}[{i}]") for i, one in enumerate(found)]

    def listed(self, value: Any, column: str) -> list[Any]:
        """Returns the list `value`. If `value` is JSON text or a dict of lists, converts it to a list: TFDS stores a
        list of dicts as a dict of lists."""
        value = _value(value)
        if isinstance(value, str | bytes):
            text, _ = text_of(value, column, self.record)
            if not text.strip():
                return []
            try:
                value = parsed(text)
            except ValueError:
                raise self.error(
                    f"column {column} holds the text {shortened(text)!r}, not messages or their JSON; if two "
                    f"columns hold a prompt and its completion, give train_data_columns=[prompt,completion]; "
                    f"otherwise {_HINT}"
                ) from None
        lists = isinstance(value, dict) and all(isinstance(items, list) for items in value.values())
        if lists and len({len(items) for items in value.values()}) == 1:
            value = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(f"column {column} holds {type(value).__name__}, not a list of messages; {_HINT}")
        return value

    def message(self, value: Any, where: str) -> Message:
        """Returns a message as templates expect it: a dict with a role, the content (text or None), and all other
        fields that are not None."""
        if not isinstance(value, Mapping):
            raise self.error(f"{where} is {shortened(repr(value))}, not a message with role and content; {_HINT}")
        given = {str(key): item for key, item in value.items() if item is not None or key == "content"}
        if "role" not in given and "from" in given:
            given = self.of_sharegpt(given, where)
        role = given.get("role")
        role = role.decode(errors="replace") if isinstance(role, bytes) else role
        if not isinstance(role, str) or not role:
            there = ", ".join(given) or "nothing"
            raise self.error(f"{where} has no role{nearest('role', given)}: it has {there}; {_HINT}")
        content = given.get("content")
        if isinstance(content, list):
            given["content"] = "".join(self.part(part, where) for part in content)
        elif not isinstance(content, str | bytes | None):
            raise self.error(f"{where} has content of type {type(content).__name__}, not text; {_HINT}")
        return {key: self.clean(item) for key, item in (given | {"role": role}).items()}

    def of_sharegpt(self, given: dict[str, Any], where: str) -> dict[str, Any]:
        """Converts a message in ShareGPT's format, in which the role is called `from` and the content `value`."""
        name = given["from"].decode(errors="replace") if isinstance(given["from"], bytes) else given["from"]
        if not isinstance(name, str) or name not in _SHARED or "value" not in given:
            raise self.error(
                f"{where} has from={shortened(str(name))}: from must be one of {', '.join(_SHARED)}, and value must "
                f"exist; {_HINT}"
            )
        rest = {key: item for key, item in given.items() if key not in ("from", "value")}
        return rest | {"role": _SHARED[name], "content": given["value"]}

    def part(self, part: Any, where: str) -> str:
        """Returns the text of `part`, one part of a message's content."""
        if isinstance(part, str):
            return part
        if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            return part["text"]
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise self.error(f"{where} has content of type {shortened(str(kind))}; only text is supported")

    def clean(self, value: Any) -> Any:
        """Returns a JSON-compatible value, with U+FFFD for characters that are not allowed in text."""
        if isinstance(value, bytes):
            value, replaced = text_of(value, "of messages", self.record)
            self.replaced += replaced
        if isinstance(value, str):
            text, surrogates = mended(value)
            text, marks = _MARKS.subn("\ufffd", text)
            self.replaced += surrogates + marks
            return text
        if isinstance(value, Mapping):
            return {str(self.clean(key)): self.clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean(item) for item in value]
        return value if isinstance(value, int | float | None) else str(value)

    def error(self, text: str) -> UserError:
        """Returns a UserError whose message begins with the record's location."""
        return UserError(f"{self.record.where}: {text}")


def _is_of_messages(text: str) -> bool:
    try:
        found = parsed(text)
    except ValueError:
        return False
    return bool(found) and all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in found)


def _plain(value: Any) -> Any:
    """Replaces NumPy arrays by lists, at any depth."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _value(value: Any) -> Any:
    """Returns `_plain(value)`. If that is a list that contains only one text, returns the text."""
    value = _plain(value)
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | bytes) else value
