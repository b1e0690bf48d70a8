"""Converts rows of Arrow tables to the Python values that were originally stored.

Arrow gives each struct the fields of all rows, and stores null in rows that lack a field. A null that the user wrote is
indistinguishable from a missing field, so null fields are omitted in structs at any depth. JSON text and lists keep
their nulls. A map becomes a dict, and a value of Arrow's JSON type is parsed.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config.json_files import parsed

_LISTS = "list", "large_list", "fixed_size_list", "list_view", "large_list_view"
Restored = Callable[[Any], Any]  # converts an Arrow value to the original value


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Returns the rows of an Arrow table or batch. If a string is not UTF-8, returns all strings as bytes."""
    try:
        rows = table.to_pylist()
    except UnicodeDecodeError:
        rows = _strings_as_bytes(table).to_pylist()
    columns = restored_columns(table.schema, json=True)
    return [restored(row, columns) for row in rows] if columns else rows


def restored_columns(schema: Any, *, json: bool = False) -> dict[str, Restored]:
    """Returns the columns of an Arrow schema that must be restored, each with a function that converts its values.
    `json`: whether values of Arrow's JSON type are still text."""
    return {field.name: found for field in schema if (found := _restored(field.type, json))}


def restored(row: Mapping[str, Any], columns: Mapping[str, Restored]) -> dict[str, Any]:
    """Returns a row with the values of `columns` (from `restored_columns`) restored."""
    return {name: columns[name](value) if name in columns else value for name, value in row.items()}


def _restored(kind: Any, json: bool) -> Restored | None:
    """Returns a function that restores values of an Arrow type; None if it would change no value."""
    import pyarrow

    kinds = pyarrow.types
    lists = (getattr(kinds, f"is_{name}") for name in _LISTS)
    if kinds.is_struct(kind):
        return functools.partial(_struct, {field.name: _restored(field.type, json) for field in kind})
    if kinds.is_map(kind):
        return functools.partial(_map, _restored(kind.item_type, json))
    if any(is_list(kind) for is_list in lists):
        of_item = _restored(kind.value_type, json)
        return of_item and functools.partial(_list, of_item)
    return _json if json and isinstance(kind, pyarrow.JsonType) else None


def _struct(fields: Mapping[str, Restored | None], value: Any) -> Any:
    if not isinstance(value, dict):  # null, or an object that the library `datasets` converted
        return value
    present = {name: item for name, item in value.items() if item is not None}
    return {name: of_field(item) if (of_field := fields.get(name)) else item for name, item in present.items()}


def _map(of_item: Restored | None, value: Any) -> Any:
    return {key: of_item(item) if of_item else item for key, item in value} if isinstance(value, list) else value


def _list(of_item: Restored, value: Any) -> Any:
    return [of_item(item) for item in value] if isinstance(value, list) else value


def _json(value: Any) -> Any:
    import pyarrow

    try:
        return value if value is None else parsed(value)
    except ValueError as error:
        raise pyarrow.ArrowInvalid(f"text of the JSON type: {error}") from error


def _strings_as_bytes(table: Any) -> Any:
    """Returns an Arrow table or batch whose strings, at any depth, are bytes, because Arrow strings may not be
    UTF-8."""
    import pyarrow

    kinds = pyarrow.types
    for i, field in enumerate(table.schema):
        if kinds.is_dictionary(field.type) or kinds.is_string_view(field.type):
            table = table.set_column(i, field.name, table.column(i).cast(pyarrow.string()))
        kind = table.schema.field(i).type
        if (wanted := _with_bytes(kind, pyarrow)) != kind:
            table = table.set_column(i, field.name, table.column(i).cast(wanted))
    return table


def _with_bytes(kind: Any, pyarrow: Any) -> Any:
    """Returns an Arrow type in which bytes replace strings at any depth."""
    kinds = pyarrow.types
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return pyarrow.large_binary()
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        make = pyarrow.list_ if kinds.is_list(kind) else pyarrow.large_list
        return make(_with_bytes(kind.value_type, pyarrow))
    if kinds.is_struct(kind):
        return pyarrow.struct([(field.name, _with_bytes(field.type, pyarrow)) for field in kind])
    return kind
