"""From logical axis names to mesh axes: arithmetic on one leaf."""

from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

Rules = Mapping[str, tuple[str, ...]]


class Axes(tuple[str | None, ...]):
    """The logical axis names of one array. A pytree leaf, where a plain tuple would be a node."""


def spec(names: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """The PartitionSpec of an array whose axes are called `names`; None is an axis that is never sharded.

    Raises:
      ValueError: a name without a rule, or two axes of the array on one mesh axis.
    """
    entries = []
    taken: dict[str, str] = {}
    for name in names:
        if name is not None and name not in rules:
            raise ValueError(f"no rule for the logical axis {name!r}; logical_axis_rules has {', '.join(rules)}")
        axes = rules[name] if name is not None else ()
        for axis in axes:
            if axis in taken:
                raise ValueError(f"axes {taken[axis]!r} and {name!r} of {tuple(names)} both map to mesh axis {axis!r}")
            taken[axis] = str(name)
        entries.append(axes[0] if len(axes) == 1 else axes or None)
    return PartitionSpec(*entries)
