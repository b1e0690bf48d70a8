"""MaxText's base.yml, recognized by what it holds; and the defaults that differ from it."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from trainer.config import maxtext
from trainer.config.dump import to_flow
from trainer.config.files import MAXTEXT_YML, Entry, read_file
from trainer.config.schema import Schema, schema
from trainer.config.values import read_node

# Tables of the mesh and of what lies where, which are not read key by key.
TABLES = ("logical_axis_rules", "mesh_axes", "data_sharding", "input_data_sharding_logical_axes")
_NOTED = ("Model", "Data", "Training")  # sections of base.yml; the other defaults change nothing that is trained
_NOT_NOTED = ("prompt", "decode_sampling_temperature")


@functools.cache
def defaults() -> Mapping[str, Any]:
    """MaxText's defaults for the keys of base.yml where they differ: maxtext.yml."""
    entries, problem, _ = read_file(MAXTEXT_YML)
    assert problem is None, problem
    keys = schema().keys
    return {entry.name: read_node(keys[entry.name], entry.node) for entry in entries if entry.name in keys}


def changed_entries(entries: Sequence[Entry], schema: Schema) -> tuple[list[Entry], list[str]]:
    """The entries of a MaxText base.yml that a person changed, and the names of those that neither program has."""
    present = [entry.name for entry in entries]
    changed, unknown = [], []
    for entry in entries:
        if entry.name in TABLES:
            continue
        key, verdict = schema.keys.get(entry.name), maxtext.find(entry.name)
        former = maxtext.former_defaults(entry.name, present)
        if key is None and verdict is None and former is None:
            unknown.append(entry.name)
            continue
        read = functools.partial(read_node, node=entry.node)
        theirs = [*(former or ()), *([] if key is None else [defaults().get(key.name, key.default)])]
        if not maxtext.same_as_any(entry.name, theirs, read) and not (verdict and verdict.accepts(read)):
            changed.append(entry)
    return changed, unknown


def differing(values: Mapping[str, Any], unset: Sequence[str]) -> list[str]:
    """`key=ours (MaxText's)` for each of the keys `unset` whose default in base.yml is not MaxText's, of those that say
    what is trained on what and how."""
    keys = schema().keys
    return [
        f"{name}={to_flow(values[name])} ({to_flow(theirs)})"
        for name, theirs in defaults().items()
        if name in unset and keys[name].section in _NOTED and name not in _NOT_NOTED and values[name] != theirs
    ]


def flatten(entries: Sequence[Entry]) -> list[Entry]:
    """`entries` with a dict under a name of MaxText's, as `lora: {lora_rank: 8}`, as entries of their own."""
    flat: list[Entry] = []
    known = schema().keys
    for entry in entries:
        nested = isinstance(entry.node, yaml.MappingNode) and entry.name not in known
        if nested and maxtext.find(entry.name) is None and maxtext.is_prefix(entry.name):
            assert isinstance(entry.node, yaml.MappingNode)
            for key, node in entry.node.value:
                given = node.value if isinstance(node, yaml.ScalarNode) else "..."
                flat.append(Entry(f"{entry.name}.{key.value}", node, given, entry.where))
        else:
            flat.append(entry)
    return flat
