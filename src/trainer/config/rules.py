"""The value of logical_axis_rules: [name, mesh axis or list of axes] pairs, one rule per logical axis name."""

from collections.abc import Iterable, Sequence
from typing import Any

from trainer.config.derived import MESH_AXES
from trainer.config.errors import nearest, shortened
from trainer.config.keys import Config
from trainer.config.tensors import dimension, tensors_of

Rule = list[Any]  # [name, mesh axis or list of mesh axes]


def read_rules(value: Sequence[Any], known: Iterable[str]) -> tuple[list[Rule], list[str]]:
    """Returns the rules in `value`, and one message for each error."""
    names = list(known)
    rules: dict[str, Rule] = {}
    problems = []
    for rule in value:
        problem = _problem(rule, names, rules)
        if problem:
            problems.append(problem)
        else:
            rules[rule[0]] = [rule[0], rule[1] if isinstance(rule[1], str) else list(rule[1] or [])]
    return list(rules.values()), problems


def merge_rules(below: Iterable[Rule], above: Iterable[Rule]) -> list[Rule]:
    """Returns `below` overridden by the rules of `above` with the same name."""
    return list(({rule[0]: rule for rule in below} | {rule[0]: rule for rule in above}).values())


def make_rules(rules: Iterable[Sequence[Any]]) -> dict[str, tuple[str, ...]]:
    """Returns a dict from each logical axis to the mesh axes over which its rule shards it."""
    return {name: (axes,) if isinstance(axes, str) else tuple(axes or ()) for name, axes in rules}


def with_lengths(names: Iterable[str], config: Config) -> str:
    """Returns a tensor's logical axes in words, each with its length if a key of `config` sets it: `[layers 2, embed
    192]`."""
    lengths = {name: config.get(dimension(name, config), "") for name in names}
    return f"[{', '.join(f'{name} {length}'.rstrip() for name, length in lengths.items())}]"


def collisions(config: Config) -> list[str]:
    """Returns one message for each pair of axes of a tensor that the rules shard over the same mesh axis."""
    axes = make_rules(config.logical_axis_rules)
    messages: dict[tuple[frozenset[str], str], str] = {}
    for tensor, names in tensors_of(config).items():
        taken: dict[str, str] = {}
        for name in names:
            for axis in axes[name]:
                if axis in taken:
                    both = f"{taken[axis]} and {name} of {tensor} {with_lengths(names, config)}"
                    messages.setdefault((frozenset((taken[axis], name)), axis), f"{both} both use mesh axis {axis}")
                taken.setdefault(axis, name)
    return list(messages.values())


def _problem(rule: Any, names: list[str], seen: dict[str, Rule]) -> str | None:
    if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str):
        allowed = "[name, mesh axis or list of axes], as in [[embed,fsdp],[norm,[]]]"
        return f"{shortened(repr(rule))} is not a rule; allowed: {allowed}"
    name, axes = rule
    if name not in names:
        return f"there is no logical axis {shortened(name)}; allowed: {', '.join(names)}{nearest(name, names)}"
    if name in seen:
        return f"two rules for {name}; a name has one rule, which may list several mesh axes"
    listed = axes if isinstance(axes, list) else [axes] if axes is not None else []
    for axis in map(str, listed):
        if axis not in MESH_AXES:
            allowed = f"{', '.join(MESH_AXES)}{nearest(axis, MESH_AXES)}"
            return f"{name}: there is no mesh axis {shortened(axis)}; allowed: {allowed}"
    if len(set(listed)) < len(listed):
        return f"{name}: a mesh axis is listed twice"
    return None
