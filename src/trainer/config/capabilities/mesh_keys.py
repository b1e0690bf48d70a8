"""The keys of the mesh, of the rules that shard over it, and of storage in host memory."""

from collections.abc import Sequence

from trainer.config import flags
from trainer.config.derived import DCN, ICI, MESH_AXES, UNUSED_AXES
from trainer.config.errors import Unbuilt
from trainer.config.key_rows import Check, Problem, Resume, Row
from trainer.config.keys import Config
from trainer.config.rules import collisions

# The keys for axis sizes, within a slice and across slices.
_SIZES = tuple(tuple(keys[axis] for axis in MESH_AXES if axis not in UNUSED_AXES) for keys in (ICI, DCN))


def _open_axes(keys: Sequence[str]) -> Problem:
    def problem(config: Config) -> str | None:
        unknown = [key for key in keys if config[key] == -1]
        return "only one of them may be -1, which means all remaining devices" if len(unknown) > 1 else None

    return problem


def _unused_axis(key: str, reason: str) -> Problem:
    return lambda config: None if config[key] == 1 else Unbuilt(f"{reason}; leave it at 1")


def _rules(config: Config) -> str | None:
    clashes = collisions(config)
    return f"{'; '.join(clashes)}; move one of the two to another mesh axis or to []" if clashes else None


ROWS = (
    Row(flags.FLAGS, Resume.SAME_BITS),
    Row((*ICI.values(), *DCN.values(), "allow_split_physical_axes", "logical_axis_rules"), Resume.LAYOUT),
    Row(("shard_optimizer_over_data",), Resume.LAYOUT),
    Row(("optimizer_memory_host_offload", "parameter_memory_host_offload"), Resume.SAME_BITS),
    Row(("sharding_tolerance", "debug_sharding"), Resume.SAME_BITS, step=False),
)
CHECKS: tuple[Check, ...] = (
    (flags.FLAGS, flags.unsupported),
    *((keys, _open_axes(keys)) for keys in _SIZES),
    *(((keys[axis],), _unused_axis(keys[axis], reason)) for axis, reason in UNUSED_AXES.items() for keys in (ICI, DCN)),
    (("logical_axis_rules",), _rules),
)
