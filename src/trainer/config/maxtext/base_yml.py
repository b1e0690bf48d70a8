"""Finds what the user changed in a MaxText base.yml, and lists our defaults that differ from MaxText's."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.dump import to_flow
from trainer.config.files import MAXTEXT_YML, POST_TRAIN, Entry, read_file
from trainer.config.maxtext import verdicts
from trainer.config.schema import Schema, plain_name, schema
from trainer.config.values import read_node

# Mesh and sharding tables of MaxText's base.yml, which are ignored.
TABLES = ("logical_axis_rules", "mesh_axes", "data_sharding", "input_data_sharding_logical_axes")
# Only defaults in these sections of base.yml affect the training result.
_NOTED = ("Model", "Data", "Training", "Optimizer", "Loss")


@functools.cache
def defaults(method: str = "") -> Mapping[str, Any]:
    """Returns a dict of MaxText's defaults, for each key with another default in our base.yml; maxtext.yml lists them.
    `method`: a key of `POST_TRAIN`, such as use_sft, whose file overrides maxtext.yml; "" for none."""
    keys = schema().keys
    found: dict[str, Any] = {}
    for path in (MAXTEXT_YML, *([POST_TRAIN[method]] if method else [])):
        entries, problem, _ = read_file(path)
        assert problem is None, problem
        found |= {entry.name: read_node(keys[entry.name], entry.node) for entry in entries if entry.name in keys}
    return found


def changed_entries(entries: Sequence[Entry], schema: Schema, method: str = "") -> tuple[list[Entry], list[str]]:
    """Returns those of `entries`, from a MaxText base.yml, that the user changed, and the names of unknown entries.
    `method`: as in `defaults`, if the file is the yml of one of MaxText's post-training programs."""
    absent = verdicts.table()["of_programs"].get(method, {})
    present = [entry.name for entry in entries]
    changed, unknown = [], []
    for entry in entries:
        if entry.name in TABLES or entry.given == absent.get(entry.name, {}).get("value"):
            continue
        key, verdict = schema.keys.get(plain_name(entry.name)), verdicts.find(entry.name)
        former = verdicts.former_defaults(entry.name, present)
        if key is None and verdict is None and former is None:
            unknown.append(entry.name)
            continue
        read = functools.partial(read_node, node=entry.node)
        theirs = [*(former or ()), *([] if key is None else [defaults(method).get(key.name, key.default)])]
        if key is not None and verdicts.means_empty(key, entry.given) and verdicts.empty_value(key.name) in theirs:
            continue
        if not verdicts.same_as_any(entry.name, theirs, read) and not (verdict and verdict.accepts(read)):
            changed.append(entry)
    return changed, unknown


def tables(entries: Sequence[Entry]) -> str:
    """Returns the end of a note that lists the ignored tables in a MaxText base.yml; "" if it has none."""
    names = [entry.name for entry in entries if entry.name in TABLES]
    return f"; its {', '.join(names)} {'is' if len(names) == 1 else 'are'} ignored" if names else ""


def differing(values: Mapping[str, Any], unset: Sequence[str], method: str) -> list[str]:
    """Returns one line for each section of base.yml that affects training and has keys whose default differs from
    MaxText's. The line lists these keys as `key=ours (MaxText's)`. Only keys in `unset` are listed. `method`: see
    `defaults`."""
    keys = schema().keys
    sections: dict[str, list[str]] = {}
    for name, theirs in defaults(method).items():
        section = keys[name].section
        if name in unset and section in _NOTED and values[name] != theirs:
            sections.setdefault(section, []).append(f"{name}={to_flow(values[name])} ({to_flow(theirs)})")
    return [
        f"{section}: defaults that differ from MaxText's (in parentheses): {', '.join(shown)}"
        for section, shown in sections.items()
    ]
