"""The type of a configuration: every key of base.yml is an attribute and an item.

keys.pyi declares the types of the keys for mypy. scripts/write_keys.py generates keys.pyi from base.yml.
"""

from typing import Any

from ml_collections import FrozenConfigDict


class Values(dict[str, Any]):
    """A configuration that is not frozen: a dict whose keys are also attributes. A ConfigDict takes 5 ms to create,
    because for each key it lists all attributes of its class (`dir`)."""

    __setattr__ = dict.__setitem__

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Config(FrozenConfigDict):
    """A FrozenConfigDict with comparisons in microseconds. JAX looks traces up by hashing and comparing the model's
    configuration. FrozenConfigDict copies both sides for a comparison, which takes 5 ms, and recomputes each hash."""

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, FrozenConfigDict) and self.as_configdict() == other.as_configdict())

    def __hash__(self) -> int:
        known: Any = self.__dict__.get("_hash")
        if known is None:
            known = super().__hash__()
            object.__setattr__(self, "_hash", known)
        return int(known)
