"""MaxText's base.yml, recognized by what it holds; and the defaults that differ from it."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

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


def tables(entries: Sequence[Entry]) -> str:
    """What a note says about the tables that a MaxText base.yml gives."""
    names = [entry.name for entry in entries if entry.name in TABLES]
    return f"; its {', '.join(names)} {'is' if len(names) == 1 else 'are'} not read" if names else ""


def differing(values: Mapping[str, Any], unset: Sequence[str]) -> list[str]:
    """A line for each section of base.yml, with `key=ours (MaxText's)` for each of the keys `unset` whose default is
    not MaxText's, of those that say what is trained on what and how."""
    keys = schema().keys
    sections: dict[str, list[str]] = {}
    for name, theirs in defaults().items():
        section = keys[name].section
        if name in unset and section in _NOTED and name not in _NOT_NOTED and values[name] != theirs:
            sections.setdefault(section, []).append(f"{name}={to_flow(values[name])} ({to_flow(theirs)})")
    return [
        f"{section}: defaults that are not MaxText's (those in brackets): {', '.join(said)}"
        for section, said in sections.items()
    ]
