"""Writes src/trainer/config/keys.pyi: the types of the configuration keys in base.yml. Only mypy reads it.

python scripts/write_keys.py
"""

from pathlib import Path

from trainer.config.schema import Key, Schema, schema

STUB = Path(__file__).parent.parent / "src" / "trainer" / "config" / "keys.pyi"
_HEAD = """\
# Written by scripts/write_keys.py from base.yml; do not edit.
from collections.abc import Mapping
from typing import Any

import ml_collections

class Values(Config): ...

class Config(Mapping[str, Any]):
    def __init__(self, values: Mapping[str, Any]) -> None: ...
    def __getitem__(self, name: str) -> Any: ...
    def __setitem__(self, name: str, value: Any) -> None: ...
    def update(self, values: Mapping[str, Any]) -> None: ...
    def __iter__(self) -> Any: ...
    def __len__(self) -> int: ...
    def to_dict(self) -> dict[str, Any]: ...
    def as_configdict(self) -> ml_collections.ConfigDict: ...
"""


def stub(schema: Schema) -> str:
    """Returns the content of keys.pyi."""
    return _HEAD + "".join(f"    {key.name}: {_type(key)}\n" for key in sorted(schema.keys.values(), key=_name))


def _name(key: Key) -> str:
    return key.name


def _type(key: Key) -> str:
    if key.kind is list:
        # A frozen configuration stores lists as tuples.
        kind = "tuple[Any, ...]" if key.item in (None, object) else f"tuple[{key.item.__name__}, ...]"
    else:
        kind = "Mapping[str, Any]" if key.kind is dict else key.kind.__name__
    return f"{kind} | None" if key.optional else kind


if __name__ == "__main__":
    STUB.write_text(stub(schema()), encoding="utf-8")
