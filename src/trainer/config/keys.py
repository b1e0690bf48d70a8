"""The type of a configuration: every key of base.yml is an attribute and an item. Its types for mypy are in keys.pyi,
which scripts/write_keys.py makes from base.yml."""

from ml_collections import FrozenConfigDict as Config

__all__ = ["Config"]
