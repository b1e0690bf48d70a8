"""Reads untrusted JSON files within limits, and checks fields by type and range."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError, shortened
from trainer.config.limits import JSON_BYTES, JSON_DEPTH
from trainer.config.schema import FLOAT32_MAX, INT32_MAX

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Field:
    """The allowed values of a field.

    Attributes:
      kind: bool, int, float (which also accepts integers), str, list or dict.
      low, high: inclusive bounds of a number; NaN and infinities are never allowed.
      null: whether null is allowed.
      item: the type of a list's items; float also allows integers.
      many: whether a list of such values is also allowed.
    """

    kind: type
    low: float | None = None
    high: float | None = None
    null: bool = False
    item: type | None = None
    many: bool = False

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        words = _WORDS[self.kind]
        if self.kind in (int, float):
            low, high = self._range
            words += f" in [{low:.12g}, {high:.12g}]"
        if self.item:
            words += f" of {self.item.__name__}"
        return words + (", or a list of these" if self.many else "") + (" or null" if self.null else "")

    def accepts(self, value: Any) -> bool:
        """Returns whether `value`, as `json` reads it, is allowed."""
        if value is None:
            return self.null
        if self.many and isinstance(value, list):
            return all(self._fits(item) for item in value)
        return self._fits(value)

    @property
    def _range(self) -> tuple[float, float]:
        most = INT32_MAX if self.kind is int else FLOAT32_MAX
        return -most if self.low is None else self.low, most if self.high is None else self.high

    def _fits(self, value: Any) -> bool:
        if isinstance(value, bool):  # bool is a subclass of int
            return self.kind is bool
        if self.kind in (int, float):
            low, high = self._range
            allowed = int if self.kind is int else (int, float)
            return isinstance(value, allowed) and low <= value <= high
        if not isinstance(value, list) or self.item is None:
            return isinstance(value, self.kind)
        return self.kind is list and all(Field(self.item)._fits(it) for it in value)


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, with values of any type.

    Raises:
      UserError: the file cannot be read, is not an object, is larger than JSON_BYTES or nested deeper than JSON_DEPTH.
    """
    try:
        with path.open("rb") as file:
            data = file.read(JSON_BYTES + 1)
        if len(data) > JSON_BYTES:
            raise ValueError(f"more than {JSON_BYTES} bytes")
        content = parsed(data.decode("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path}: cannot be read: {shortened(str(error))}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content


def parsed(text: str | bytes) -> Any:
    """Returns `json.loads(text)`. Raises ValueError if it is not JSON, or nested deeper than JSON_DEPTH."""
    try:
        value = json.loads(text)
        _check_depth(value)
    except RecursionError:
        raise ValueError(f"nested deeper than {JSON_DEPTH}") from None
    return value


def field_problems(data: Mapping[str, Any], fields: Mapping[str, Field]) -> list[str]:
    """Returns a message for each value in `data` that its field in `fields` does not allow. Ignores names without a
    field."""
    return [
        f"{name}={shown(data[name])}, not {field.allowed}"
        for name, field in fields.items()
        if name in data and not field.accepts(data[name])
    ]


def shown(value: Any) -> str:
    """Returns `value` as JSON, for a message. Truncates long text."""
    return shortened(json.dumps(value))


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    depth = 0
    while level := [child for node in level if isinstance(node, dict | list) for child in _children(node)]:
        depth += 1
        if depth > JSON_DEPTH:
            raise RecursionError


def _children(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node
