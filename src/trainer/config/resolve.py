"""Stage 2 of reading a configuration, after stage 1 (`load`): fills in values that depend on the devices, and checks
values that depend on the mesh."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from trainer.config.capabilities.context_keys import CHECKS as CONTEXT_CHECKS
from trainer.config.capabilities.context_keys import splits_rows, token_order
from trainer.config.capabilities.invariant_keys import split_on
from trainer.config.capabilities.kernels import Capability, choose_attention, shares_of_queries
from trainer.config.capabilities.pipeline_keys import CHECKS as PIPELINE_CHECKS
from trainer.config.capabilities.pipeline_keys import STAGE, fewest, microbatches, stages
from trainer.config.capabilities.splash_tiles import wrong_tiles
from trainer.config.capabilities.vocab_tiles import choose_tiles
from trainer.config.capabilities.windows import period
from trainer.config.derived import FOLLOWS, has_rollouts, mesh_axes
from trainer.config.errors import report
from trainer.config.family import fixed
from trainer.config.keys import Config, Values
from trainer.config.mesh_sizes import fill_mesh
from trainer.config.numbers import around, divisors, multiples_around
from trainer.config.rules import make_rules, with_lengths
from trainer.config.schema import INT32_MAX
from trainer.config.sizes import too_large
from trainer.config.tensors import DIMENSIONS, PROJECTED, dimension, tensors_of


def resolve(
    config: Mapping[str, Any],
    *,
    device_count: int,
    platform: str,
    num_slices: int | None = None,
    capability: Capability | None = None,
) -> Config:
    """Returns the frozen configuration for `device_count` devices of `platform` (cpu, gpu or tpu).

    See `resolved` for the arguments and errors.
    """
    values = resolved(
        config, device_count=device_count, platform=platform, num_slices=num_slices, capability=capability
    )
    return Config(values)


def resolved(
    config: Mapping[str, Any],
    *,
    device_count: int,
    platform: str,
    num_slices: int | None = None,
    capability: Capability | None = None,
) -> Values:
    """Like `resolve`, but returns mutable values, in a tenth of the time. Use it to check many configurations.

    `num_slices`: the number of slices; None for devices without slices (see `mesh_sizes.fill_mesh`). `capability`: the
    lowest compute capability of the NVIDIA GPUs; None if unknown.

    Raises:
      UserError: lists all errors, one line each.
    """
    values = Values({name: frozen(value) for name, value in config.items()})
    _fill(values, platform)
    mistakes = _other_hardware(values.hardware, platform)
    mesh_problems = fill_mesh(values, device_count, num_slices)
    mistakes += mesh_problems
    mesh = {} if mesh_problems else mesh_axes(values)
    if order := token_order(values):
        values.context_parallel_reorder_strategy = order[0]
    if mesh:
        mistakes += _misfits(values, PIPELINE_CHECKS)
        uneven = [*_indivisible(values, mesh), *_uneven_rows(values, mesh)]
        mistakes += split_on(values, mesh) or [*_misfits(values, CONTEXT_CHECKS), *uneven] or choose_tiles(values)
    values.attention, unsupported = choose_attention(values, mesh, platform, capability)
    if mesh:
        mistakes += too_large(values)
    mistakes += unsupported or _wrong_tiles(values)
    if mistakes:
        raise report(mistakes)
    return values


def _wrong_tiles(values: Config) -> list[str]:
    return wrong_tiles(values, shares_of_queries(values)) if values.attention == "splash" else []


def _other_hardware(hardware: str, platform: str) -> list[str]:
    if not hardware or hardware.partition("_")[0] == platform:
        return []
    return [f"hardware={hardware}: the devices are {platform}; leave it out; JAX_PLATFORMS selects the platform"]


def _misfits(values: Config, checks: Iterable[tuple[Collection[str], Callable[[Any], Any]]]) -> list[str]:
    """Returns one line for each check of stage 1 that fails with the final mesh."""
    failed = [(keys, said) for keys, problem in checks if (said := problem(values))]
    return [f"{' '.join(_shown(key, values[key]) for key in keys)}: {said}" for keys, said in failed]


def _shown(key: str, value: Any) -> str:
    if isinstance(value, tuple):  # a value such as logical_axis_rules is too long for a message
        return key
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def frozen(value: Any) -> Any:
    """Returns `value` with its lists as tuples, so that resolving a configuration again returns an equal one."""
    return tuple(frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _fill(values: Config, platform: str) -> None:
    if values.dtype == "auto":
        values.dtype = "float32" if platform == "cpu" else "bfloat16"
    for key, followed in FOLLOWS.items():
        values[key] = values[key] or followed(values)
    values.update(fixed(values))
    values.sliding_window_pattern = period(values) or values.sliding_window_pattern
    published = {"llama3.1": (8.0, 8192), "yarn": (40.0, 4096)}
    if values.rope_type in published:
        factor, length = published[values.rope_type]
        values.rope_factor = values.rope_factor or factor
        values.original_max_position_embeddings = values.original_max_position_embeddings or length
    if has_rollouts(values) and values.num_batches > 0:
        values.steps = values.num_batches * values.rl_num_iterations
    if values.steps == -1:
        values.steps = values.learning_rate_schedule_steps
    if values.learning_rate_schedule_steps == -1:
        values.learning_rate_schedule_steps = values.steps


def _indivisible(values: Config, mesh: Mapping[str, int]) -> list[str]:
    """Returns one line for each axis length that is not divisible by the number of shards of its sharding rule."""
    blocked: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    rules = make_rules(values.logical_axis_rules)
    tensors = tensors_of(values)
    named = {name for names in tensors.values() for name in names}
    sized = [(name, dimension(name, values)) for name in DIMENSIONS if name in named]
    if splits_rows(values):  # CONTEXT_CHECKS check the row length
        sized = [(name, key) for name, key in sized if key != "max_target_length"]
    if values.mtp_num_layers:
        sized.append(PROJECTED)
    for name, key in sized:
        if values[key] % _product(mesh, rules[name]):
            blocked.setdefault((key, rules[name]), []).append(name)
    lines = []
    for (key, axes), names in blocked.items():
        size, parts = values[key], _product(mesh, axes)
        fitting = multiples_around(size, parts)
        if (names[0], key) == PROJECTED:
            where = f"the projection of a multi-token prediction module [embed {2 * size}, mlp {size}]"
        else:
            tensor, axis_names = next((tensor, all_of) for tensor, all_of in tensors.items() if names[0] in all_of)
            where = f"{tensor} {with_lengths(axis_names, values)}"
        lines.append(f"{key}={size}: {_split(mesh, axes, names)} does not divide it in {where}; nearest: {fitting}")
    return lines


def _uneven_rows(values: Config, mesh: Mapping[str, int]) -> list[str]:
    """Returns one line for each batch size that does not split into equally many rows per shard and microbatch."""
    keys = ["per_device_batch_size"]
    if values.eval_interval > 0 and values.eval_per_device_batch_size % values.per_device_batch_size:
        keys.append("eval_per_device_batch_size")
    # Rows are split over DiLoCo's islands, then by the rule of activation_batch.
    axes = ("diloco", *make_rules(values.logical_axis_rules)["activation_batch"])
    devices, count = math.prod(mesh.values()), microbatches(values)
    if count % stages(values):
        count = 1  # PIPELINE_CHECKS report this mismatch
    else:
        axes = tuple(axis for axis in axes if axis != STAGE)  # stages do not split a microbatch
    parts, batches = count * _product(mesh, axes), {key: values[key] * devices for key in keys}
    others = _other_counts(values, count, parts // count, batches.values()) if count > 1 else ""
    lines = []
    for key, rows in batches.items():
        if _is_whole(rows) and round(rows) % parts == 0:
            continue
        below = math.floor(rows / parts) * parts
        fitting = " or ".join(f"{n / devices:.12g}" for n in (below, below + parts) if n) + others
        product = f"{values[key]:g} x {devices} devices = {rows:.6g} rows"
        split = _split(mesh, axes, ["activation_batch"], count)
        lines.append(f"{key}={values[key]:g}: {product}, not a whole multiple of {parts} ({split}); nearest: {fitting}")
    return lines


def _is_whole(rows: float) -> bool:
    # Binary floating point does not represent 0.1 exactly, but 0.1 x 30 devices must count as 3 rows.
    return round(rows) >= 1 and abs(rows - round(rows)) < 1e-6


def _other_counts(values: Config, count: int, shards: int, batches: Collection[float]) -> str:
    """Returns the end of a message that suggests the nearest values of num_pipeline_microbatches that divide every
    batch evenly; "" if there are none. `shards`: the number of shards of a microbatch. `batches`: rows per batch."""
    step = stages(values) * shards
    if not all(_is_whole(rows) and rows <= INT32_MAX and round(rows) % step == 0 for rows in batches):
        return ""
    fitting = [n * stages(values) for n in divisors(*(round(rows) // step for rows in batches))]
    near = around(count, (n for n in fitting if n > count or n >= fewest(values)))
    return near and f", or num_pipeline_microbatches={near}"


def _split(mesh: Mapping[str, int], axes: tuple[str, ...], names: list[str], count: int = 1) -> str:
    """Returns how a rule shards a length, in words: `fsdp 4 x tensor 2 = 8 by the rule of embed`. `count`: the
    number of pipeline microbatches, each of which is sharded."""
    splitting = [f"{axis} {mesh[axis]}" for axis in axes if mesh[axis] > 1]
    by_rule = f" by the rule of {' and '.join(names)}"
    if count > 1:
        splitting, by_rule = [f"num_pipeline_microbatches {count}", *splitting], by_rule if splitting else ""
    total = f" = {count * _product(mesh, axes)}" if len(splitting) > 1 else ""
    return f"{' x '.join(splitting) or 'no mesh axis above 1'}{total}{by_rule}"


def _product(mesh: Mapping[str, int], axes: tuple[str, ...]) -> int:
    return math.prod(mesh[axis] for axis in axes)
