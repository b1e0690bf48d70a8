"""The configurations that a plan chooses from: a Cartesian product of dimensions, which are lists of alternative
settings."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainer.config.capabilities.expert_keys import has_experts
from trainer.config.derived import DCN, ICI, UNUSED_AXES
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.numbers import divisors
from trainer.config.words import counted

Changes = Mapping[str, Any]  # key -> value

OBJECTIVES = TOKENS, BATCH = "tokens", "batch"
SHARDING, REMAT, TILES, OFFLOAD, ROWS = "sharding", "rematerialization", "vocabulary tiles", "host offload", "rows"
# Values of remat_policy. Left out: aliases, `custom`, and the variants of policies that also keep quantized operands.
POLICIES = (
    *("none", "minimal_with_context", "minimal", "save_dot_with_context_except_mlp", "save_dot_except_mlp"),
    *("save_qkv_proj", "save_out_proj", "full", "qkv_proj_offloaded", "minimal_offloaded"),
)
# The mesh axes that a plan varies by default. Other axes keep the size that the command gives.
VARIED = ("data", "stage", "fsdp", "context", "tensor", "expert")
_MICROBATCHES = (1, 2, 4)  # numbers of pipeline microbatches, as multiples of the number of stages
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # rows per device


class Dimension(NamedTuple):
    """Alternative settings, of which a point has exactly one."""

    name: str
    choices: tuple[Changes, ...]


class Space(NamedTuple):
    """All combinations of one choice from each dimension."""

    dimensions: tuple[Dimension, ...]

    @property
    def size(self) -> int:
        """The number of points."""
        return math.prod(len(dimension.choices) for dimension in self.dimensions)

    def points(self) -> Iterator[Changes]:
        """Yields the settings of each point."""
        for choices in itertools.product(*(dimension.choices for dimension in self.dimensions)):
            yield {key: value for choice in choices for key, value in choice.items()}


def default_space(
    config: Config,
    devices: int,
    slices: int,
    fixed: Collection[str],
    search: Mapping[str, Sequence[Any]] | None = None,
    global_batch_tokens: int = 0,
) -> Space:
    """Returns the space of every mesh of the devices, with and without Zero-1, combined with rematerialization
    policies, vocabulary tiles, host offload and rows per device.

    Args:
      config: not resolved.
      devices: the number of devices in a slice.
      slices: the number of slices.
      fixed: the keys that the command gives; they keep their values, except for a mesh axis of size -1.
      search: for each key, the values to choose from. They replace the key's default choices. A key without default
        choices becomes a new dimension. For a key of the mesh, only meshes with one of the values are kept.
      global_batch_tokens: tokens per update, reached by gradient accumulation. 0: not fixed, and
        gradient_accumulation_steps keeps its value.

    Raises:
      UserError: no mesh or no batch has the given values.
    """
    search = dict(search or {})
    if global_batch_tokens and "max_target_length" in search:
        raise UserError(
            "search.max_target_length excludes global_batch_tokens: each length needs other rows; leave one out"
        )
    fixed = [key for key in fixed if config[key] != -1 or key not in (*ICI.values(), *DCN.values())]
    on_host = ("optimizer_memory_host_offload", "parameter_memory_host_offload")
    offloads: list[Changes] = [{}, *({key: True} for key in on_host), dict.fromkeys(on_host, True)]
    dimensions = [
        Dimension(SHARDING, _meshes(config, devices, slices, fixed, search)),
        Dimension(REMAT, tuple({"remat_policy": name} for name in POLICIES)),
        Dimension(TILES, ({"num_vocab_tiling": 1}, {"num_vocab_tiling": -1})),
        Dimension(OFFLOAD, tuple(offloads)),
        Dimension(ROWS, _rows(config, devices * slices, fixed, search, global_batch_tokens)),
    ]
    narrowed = [_narrowed(dimension, config, fixed, search) for dimension in dimensions]
    added = [Dimension(key, tuple({key: value} for value in values)) for key, values in search.items()]
    return Space((*narrowed, *added))


def _narrowed(
    dimension: Dimension, config: Config, fixed: Collection[str], search: dict[str, Sequence[Any]]
) -> Dimension:
    """Applies `fixed` and `search` to a dimension, and removes the used keys from `search`."""
    keys = {key for choice in dimension.choices for key in choice}
    if len(keys) == 1 and (asked := [key for key in keys if key in search]):
        return Dimension(dimension.name, tuple({asked[0]: value} for value in search.pop(asked[0])))
    choices = list(dimension.choices)
    for key in keys:
        if key in search:
            wanted = search.pop(key)
            choices = [choice for choice in choices if choice.get(key, config[key]) in wanted]
            if not choices:
                raise UserError(f"search.{key}: no point of the space has one of these values: {list(wanted)}")
        elif key in fixed:
            choices = [{name: value for name, value in choice.items() if name != key} for choice in choices]
    return Dimension(dimension.name, tuple({tuple(sorted(choice.items())): choice for choice in choices}.values()))


def _meshes(
    config: Config, devices: int, slices: int, fixed: Collection[str], search: dict[str, Sequence[Any]]
) -> tuple[Changes, ...]:
    of = {"ici": counted(devices, "device"), "dcn": counted(slices, "slice")}
    inside = _sizes(config, ICI, _axes(config, ICI, search), devices, fixed, of["ici"])
    between = _sizes(config, DCN, _axes(config, DCN, search), slices, fixed, of["dcn"])
    found = []
    for own, others in itertools.product(inside, between):
        mesh = {ICI[axis]: size for axis, size in own.items()} | {DCN[axis]: size for axis, size in others.items()}
        found += _with_more(config, mesh, {axis: own[axis] * others[axis] for axis in ("data", "stage")}, fixed, search)
    for key in (*ICI.values(), *DCN.values()):
        if key in search:
            wanted = search.pop(key)
            found = [mesh for mesh in found if mesh.get(key, config[key]) in wanted]
            if not found:
                raise UserError(f"search.{key}={','.join(map(str, wanted))}: no mesh of {of[key[:3]]} has such a size")
    return tuple(found)


def _axes(config: Config, keys: Mapping[str, str], search: Collection[str]) -> list[str]:
    """Returns the axes to vary within slices (`keys` is ICI) or over slices (DCN)."""
    varied = [axis for axis in VARIED if axis not in UNUSED_AXES and (axis != "expert" or has_experts(config))]
    return [*varied, *(axis for axis, key in keys.items() if key in search and axis not in varied)]


def _with_more(
    config: Config, mesh: dict[str, int], sizes: Mapping[str, int], fixed: Collection[str], search: Collection[str]
) -> list[dict[str, Any]]:
    """Returns variants of `mesh` with settings that matter only on some meshes: Zero-1 and pipeline microbatches."""
    zero1, parts = "shard_optimizer_over_data", "num_pipeline_microbatches"
    found: list[dict[str, Any]] = [mesh]
    if sizes["data"] > 1 and zero1 not in (*fixed, *search):
        found = [changes | {zero1: value} for changes in found for value in (False, True)]
    if sizes["stage"] > 1 and parts not in (*fixed, *search):
        found = [changes | {parts: n * sizes["stage"]} for changes in found for n in _MICROBATCHES]
    return found


def _sizes(
    config: Config, keys: Mapping[str, str], axes: Sequence[str], count: int, fixed: Collection[str], of: str
) -> list[dict[str, int]]:
    """Returns all choices of sizes for `axes` such that the product over all mesh axes is `count`. `of`: `count` in
    words."""
    others = math.prod(config[key] for axis, key in keys.items() if axis not in axes and config[key] != -1)
    given = {axis: config[keys[axis]] for axis in axes if keys[axis] in fixed}
    left, rest = divmod(count, others * math.prod(given.values()))
    free = [axis for axis in axes if axis not in given]
    if rest or (left > 1 and not free):
        shown = " ".join(f"{keys[axis]}={size}" for axis, size in given.items())
        raise UserError(f"{shown or 'the other mesh axes'}: no mesh of {of} has these sizes")
    return [given | dict(zip(free, sizes, strict=True)) for sizes in _factorizations(left, len(free))]


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 0:
        yield ()
    elif parts == 1:
        yield (number,)
    else:
        for first in divisors(number):
            for others in _factorizations(number // first, parts - 1):
                yield (first, *others)


def _rows(
    config: Config, devices: int, fixed: Collection[str], search: dict[str, Sequence[Any]], tokens: int
) -> tuple[Changes, ...]:
    rows, steps = "per_device_batch_size", "gradient_accumulation_steps"
    if rows in search:
        sizes = search.pop(rows)
    elif rows in fixed:
        sizes = [config[rows]]
    else:
        sizes = [*(1 / n for n in reversed(divisors(devices)) if n > 1), *_ROWS]
    if not tokens:
        return tuple({rows: size} for size in sizes)
    sizes = [size for size in sizes if round(size * devices)]
    if steps in fixed or steps in search:
        raise UserError(
            f"{steps} and global_batch_tokens={tokens}: give one of them; accumulation follows from the tokens"
        )
    found = []
    for size in sizes:
        count, rest = divmod(tokens, round(size * devices) * config.max_target_length)
        if count and not rest:
            found.append({rows: size, steps: count})
    if not found:
        steps_of = sorted({round(size * devices) * config.max_target_length for size in sizes})
        if not steps_of:
            raise UserError(f"global_batch_tokens={tokens}: {rows} gives less than one row for {devices} devices")
        nearest = min((max(1, round(tokens / step)) * step for step in steps_of), key=lambda other: abs(other - tokens))
        shown = " or ".join(map(str, steps_of[:4])) + (" ..." if len(steps_of) > 4 else "")
        raise UserError(
            f"global_batch_tokens={tokens}: not a multiple of the tokens of a step ({shown}); nearest: {nearest}"
        )
    return tuple(found)
