"""Functions for document_filter."""

from typing import Any


def shout(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value.upper() if isinstance(value, str) else value for name, value in record.items()}


def even(record: dict[str, Any]) -> bool:
    return record["number"] % 2 == 0


def failing(record: dict[str, Any]) -> bool:
    return record["text"].no_such_method()


def wrong(record: dict[str, Any]) -> Any:
    return {"other": record}
