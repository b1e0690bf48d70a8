"""Turns command-line arguments and entries of files into settings according to the schema, and collects all errors."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.errors import SCREEN_LINES, Unbuilt, nearest, shortened
from trainer.config.files import Entry, YmlFile
from trainer.config.maxtext import base_yml, verdicts
from trainer.config.rules import merge_rules, read_rules
from trainer.config.schema import GROUPS, Key, Schema, plain_name
from trainer.config.values import check, read_node, read_text


@dataclass(frozen=True)
class Setting:
    """A key's value and its source."""

    value: Any
    where: str


@dataclass
class Reader:
    """Reads settings according to the schema. Collects errors (`mistakes`), and the keys whose values could not be read
    (`broken`)."""

    schema: Schema
    mistakes: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    accepted: list[verdicts.Accepted] = field(default_factory=list)  # MaxText's keys that have no effect
    renamed: list[str] = field(default_factory=list)  # a note for each value of MaxText that has another name here
    unknown: list[str] = field(default_factory=list)  # unknown keys of a MaxText base.yml
    _suggested: int = 0

    def nearest_key(self, name: str) -> str:
        """Returns the end of a message that suggests a key: the nearest of our keys (see `nearest`) or of MaxText's.
        Returns "" after SCREEN_LINES calls, because each search takes milliseconds."""
        self._suggested += 1
        if self._suggested > SCREEN_LINES:
            return ""
        ours, theirs = nearest(name, self.schema.keys), verdicts.nearest_name(name)
        # Whether our key contains all words of `name`, and is not just spelled similarly.
        contains = bool(ours) and all(part in ours for part in name.split("_"))
        prefix = theirs is not None and theirs.startswith(f"{name}_") and not contains
        return f"; nearest: {theirs} (of MaxText)" if theirs and (prefix or not ours) else ours

    def setting(self, name: str, given: str, where: str, read: Callable[[Key], Any]) -> dict[str, Setting]:
        """Returns {key: setting} for the key `name`, which the source `where` sets to the text `given`; {} after an
        error. `read(key)` parses the value."""
        shown, name = f"{shortened(name)}={shortened(given)} ({where})", plain_name(name)
        key = self.schema.keys.get(name)
        if key is None:
            self._foreign(name, given, shown, read)
            return {}
        problems: list[str] = []
        try:
            value = verdicts.empty_value(name) if verdicts.means_empty(key, given) else read(key)
        except ValueError as error:
            problems = [f"{error}; allowed: {key.allowed}"]
        else:
            problem = check(key, value)
            ours, why = verdicts.value_here(name, given) if problem else ("", "")
            if ours:
                value = read_text(key, ours)
                self.renamed.append(f"MaxText's {name}={given} is {ours} here: {why}")
            elif problem:
                known = verdicts.why_refused(name, given)
                hint = f"; {known}" if known else nearest(given, map(str, key.choices))
                problems = [f"{problem}; allowed: {key.allowed}{hint}"]
            elif name == "logical_axis_rules":
                value, problems = read_rules(value, [rule[0] for rule in key.default])
        if problems:
            self.mistakes += [f"{shown}: {problem}" for problem in problems]
            self.broken.add(name)
            return {}
        return {name: Setting(value, where)}

    def entry(self, entry: Entry) -> dict[str, Setting]:
        """Returns the setting of one entry of a file."""
        return self.setting(entry.name, entry.given, entry.where, functools.partial(read_node, node=entry.node))

    def file(self, file: YmlFile) -> dict[str, Setting]:
        """Returns the settings of a file; for a copy of base.yml (ours or MaxText's), only those that the user
        changed."""
        settings: dict[str, Setting] = {}
        entries: Sequence[Entry] = file.entries
        if file.is_maxtext:
            entries, unknown = base_yml.changed_entries(entries, self.schema)
            self.unknown += unknown
        for entry in entries:
            settings |= self.entry(entry)
        if not file.is_root or file.is_maxtext:
            return settings
        return {name: setting for name, setting in settings.items() if setting.value != self.schema.keys[name].default}

    def _foreign(self, name: str, given: str, shown: str, read: Callable[[Key], Any]) -> None:
        """Handles a key that is not in base.yml: a key of MaxText or an unknown key."""
        verdict = verdicts.find(name)
        if verdict is None and (name in GROUPS or verdicts.is_prefix(name)):
            self.mistakes.append(f"{shown}: a group of MaxText's keys; give them individually, {name}.KEY=VALUE")
        elif verdict is None:
            self.mistakes.append(f"{shown}: there is no key {shortened(name)}{self.nearest_key(name)}")
        elif verdict.accepts(read):
            self.accepted.append(verdicts.Accepted(verdict, shortened(given)))
        else:
            message = f"{shown}: {verdict.problem(shortened(given))}"
            self.mistakes.append(Unbuilt(message) if verdict.kind == verdicts.NOT_YET else message)


def merge(below: dict[str, Setting], above: dict[str, Setting]) -> dict[str, Setting]:
    """Returns `below` overridden by `above`. In logical_axis_rules, only rules of the same name are overridden."""
    merged = below | above
    if "logical_axis_rules" in below and "logical_axis_rules" in above:
        rules = merge_rules(below["logical_axis_rules"].value, above["logical_axis_rules"].value)
        merged["logical_axis_rules"] = Setting(rules, above["logical_axis_rules"].where)
    return merged
