"""Reads the saved config.yml of a run as untrusted data."""

from typing import Any

import yaml

from trainer.config.errors import UserError, shortened
from trainer.config.plain_yaml import compose, describe
from trainer.config.schema import schema
from trainer.config.values import check, read_node

_MOST_LINES = 12  # the maximum number of lines in a message


def read_saved(text: str, where: str) -> dict[str, Any]:
    """Returns the values of base.yml's keys in `text`. Ignores other keys.

    Args:
      where: the file, for messages.

    Raises:
      UserError: the text is not YAML, exceeds a limit of `plain_yaml`, or has values that base.yml does not allow.
    """
    try:
        node = compose(text)
    except yaml.YAMLError as error:
        raise UserError(describe(error, where)) from None
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{where}: not a mapping of `key: value` lines")
    values: dict[str, Any] = {}
    mistakes = []
    for name_node, value_node in node.value:
        key = schema().keys.get(name_node.value) if isinstance(name_node, yaml.ScalarNode) else None
        if key is None:
            continue
        try:
            values[key.name] = read_node(key, value_node)
            problem = check(key, values[key.name])
        except ValueError as error:
            problem = str(error)
        if problem:
            start, end = value_node.start_mark.index, value_node.end_mark.index
            mistakes.append(f"{key.name}={shortened(text[start:end])}: {problem}; allowed: {key.allowed}")
    if mistakes:
        more = [f"and {len(mistakes) - _MOST_LINES} more"] if len(mistakes) > _MOST_LINES else []
        raise UserError("\n  ".join([f"{where}: values that are not allowed:", *mistakes[:_MOST_LINES], *more]))
    return values
