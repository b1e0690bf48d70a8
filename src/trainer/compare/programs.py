"""Compares the programs of configurations with the first program, or a record of it, on the same state and batch."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from trainer.compare import measure
from trainer.compare.difference import Tolerance, differences, forward_order
from trainer.compare.measure import Measured, Program
from trainer.compare.record import Record, Writer
from trainer.compare.reference import (
    Build,
    Reference,
    Say,
    Step,
    axes_of,
    build_side,
    head_of,
    microbatch_rows,
    reference,
)
from trainer.compare.report import Comparison, Quantity, Report
from trainer.config.capabilities.all_keys import keys_of
from trainer.config.dump import PROCESSES, SUPERVISION, to_flow
from trainer.config.errors import UserError
from trainer.config.files import by_hand
from trainer.config.flags import FLAGS, combination
from trainer.config.key_rows import Resume
from trainer.config.resume import MAY_CHANGE
from trainer.config.schema import schema
from trainer.config.sides import Side
from trainer.config.sides import differences as differing_keys
from trainer.data.batches import Batch
from trainer.state.host import KEYS
from trainer.training.build import build

# Keys that determine where parameters and tokens come from. All sides use the left side's parameters and tokens.
_COMMON = (
    "vocab_size",
    "load_parameters_path",
    "load_full_state_path",
    "reset_optimizer",
    "data_cache_directory",
    # Evaluation data affect the batch: without them, some training documents are held out for evaluation.
    "eval_split",
    "grain_eval_files",
    "hf_eval_split",
    "hf_eval_files",
)
# Keys that are not in `_IDLE`, because they affect a comparison. An exception is override_model_config: no command uses
# it, and another message says so.
_USED = {
    "model_name",
    "record_internal_nn_metrics",
    "parameter_metrics_period",
    "skip_step_scaling_factor",
    "override_model_config",
    *_COMMON,
}
_IDLE = frozenset((*keys_of(Resume.AROUND), *PROCESSES, *SUPERVISION, "debug_sharding")) - _USED
# In the order of a training step.
MEASURES: tuple[Step, ...] = (measure.parameters, measure.activations, measure.gradients, measure.update)


def compare_programs(
    sides: Sequence[Side],
    devices: Sequence[jax.Device],
    tolerance: Tolerance,
    say: Say,
    record: Record | None = None,
    build: Build = build,
) -> Report:
    """Builds each side's programs, runs them on the left side's parameters and batch, and compares the results.

    At any time, the devices hold the state and one program of a single side; the left side's results are on the host.

    Args:
      sides: the left side, followed by the sides to compare with it.
      devices: all devices. A side whose mesh sizes are all given uses as many as the mesh needs; other sides use all.
      tolerance: applies to every array of every quantity.
      say: receives progress messages.
      record: the recorded results of the left side. If given, the left side is not built.
      build: builds the run of a side from its configuration and devices.

    Raises:
      UserError: a side does not fit the devices, or cannot use the left side's batch; or the record is damaged.
    """
    built = [build_side(side, devices, build) for side in (sides[1:] if record else sides)]
    _check_common(sides, record.rows if record else built[0].run.rows, built)
    if idle := _idle(sides):
        say(
            f"{', '.join(idle)} have no effect here: a single process compares on its own devices, and nothing is "
            "written, evaluated or sampled"
        )
    left = record.reference() if record else reference(sides[0], built.pop(0), say)
    rows = _activation_rows(left, built)
    for right in built:
        _check_batch(left, right)
    quantities: dict[str, list[Quantity]] = {program.name: [] for program in built}
    facts: dict[str, dict[str, Any]] = {program.name: {} for program in built}
    for step in MEASURES:
        part, known = _batch_of(step, left, rows), measure.Shared()
        say(f"{left.name}: {step.__name__}")
        expected = left.measured(step, part, known)
        for program in built:
            say(f"{program.name}: {step.__name__}")
            measured = step(program, left.snapshot, part, known)
            quantities[program.name] += _quantities(left, program, expected, measured, tolerance)
            facts[program.name] |= _facts(expected.facts, measured.facts)
    comparisons = [Comparison(right.name, quantities[right.name], facts[right.name]) for right in built]
    return Report(left.name, tolerance, [*(record.head if record else []), *_head(left, sides, built)], comparisons)


def record_program(
    side: Side, devices: Sequence[jax.Device], path: Path, say: Say, *, arrays: bool, build: Build = build
) -> None:
    """Builds the side's program, measures it, and writes a record of it to `path`; see `compare_programs`.

    Raises:
      UserError: the side does not fit the devices, or the file exists or cannot be written.
    """
    with Writer(path, _IDLE, arrays=arrays) as writer:
        program = build_side(side, devices, build)
        _check_common([side], program.run.rows, [program])
        left = reference(side, program, say)
        writer.begin(left, side)
        for step in MEASURES:
            known = measure.Shared()
            say(f"{left.name}: {step.__name__}")
            writer.add(left, step, left.measured(step, _batch_of(step, left, left.microbatch), known), known)


def _batch_of(step: Step, left: Reference, activation_rows: int) -> Batch:
    rows = activation_rows if step is measure.activations else left.rows
    return {name: array[:rows] for name, array in left.batch.items()}


def _idle(sides: Sequence[Side]) -> list[str]:
    """Returns keys that are given on the command line or differ between sides, but do not affect a comparison.

    A key that a yml sets for all sides is not returned, because the yml may have been written for training.
    """
    given = {key for side in sides for key, where in side.loaded.changed.items() if by_hand(where)}
    idle = (given | differing_keys(sides).keys()) & _IDLE
    return [key for key in schema().keys if key in idle]


def _check_common(sides: Sequence[Side], rows: int, built: Sequence[Program]) -> None:
    """Raises UserError if a side cannot start from the left side's parameters and batch. `rows`: the number of rows of
    the batch."""
    data = [key.name for key in schema().keys.values() if key.section == "Data" and key.name not in MAY_CHANGE]
    mistakes = [
        f"{program.name}: {key}=true: comparisons need the state on the device; leave the key out"
        for program in built
        for key in KEYS.values()
        if program.config[key]
    ]
    left, *rights = sides
    for side, right in zip(rights, built[-len(rights) :], strict=True) if rights else ():
        other = differing_keys([left, side]).keys() & {*data, *_COMMON}
        if other:
            mistakes.append(
                f"{', '.join(key for key in (*data, *_COMMON) if key in other)}: different in {left.name} and "
                f"{right.name}, but both get the same parameters and batch; give "
                "these keys without the prefixes left. and right."
            )
        elif rows != right.run.rows:
            fitting = right.config.per_device_batch_size * rows / right.run.rows
            mistakes.append(
                f"{left.name} has {rows} rows in its batch and {right.name} has {right.run.rows}, but both "
                f"get the same batch; nearest for {right.name}: per_device_batch_size={fitting:.12g}"
            )
    if mistakes:
        raise UserError("\n  ".join(["these sides cannot be compared:", *mistakes]))


def _activation_rows(left: Reference, built: Sequence[Program]) -> int:
    """Returns the number of rows whose activations are compared: the least common multiple of all sides' microbatch
    sizes. If the left side is a record, it must contain the activations of exactly this number of rows."""
    needed = math.lcm(left.microbatch, *map(microbatch_rows, built))
    if left.recorded and needed != left.microbatch:
        raise UserError(
            f"{left.name} contains the activations of {left.microbatch} rows, but another side's microbatch needs "
            "more; record the left side with gradient_accumulation_steps=1, and compare the others with this record"
        )
    return needed


def _check_batch(left: Reference, right: Program) -> None:
    """Raises UserError if the right side cannot use the left side's batch, which may be from a record."""
    wanted = {name: (leaf.shape, leaf.dtype) for name, leaf in right.run.given_batch(left.rows).items()}
    got = {name: (array.shape, array.dtype) for name, array in left.batch.items()}
    if wanted != got:
        texts = [
            ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in sorted(it.items()))
            for it in (got, wanted)
        ]
        raise UserError(f"the batch of {left.name} is {texts[0]}; {right.name} needs {texts[1]}")
    for name in ("inputs", "targets"):
        if left.batch[name].min() < 0 or left.batch[name].max() >= right.config.vocab_size:
            raise UserError(f"the batch of {left.name} has tokens outside of vocab_size={right.config.vocab_size}")


def _quantities(left: Reference, right: Program, expected: Measured, measured: Measured, tolerance: Tolerance) -> list:
    quantities = []
    for name, arrays in expected.arrays.items():
        others, notes, remarks = right.names.shaped(measured.arrays[name], arrays), [], []
        if name == "parameters":
            notes = _other_axes(left, right)
            if left.config.decoder_block != right.config.decoder_block:
                notes, remarks = [], notes  # each block chooses its own axis names
        elif name == "activations":
            # Each block chooses the activations that it sows.
            remarks = [f"{path}: sown on one side only" for path in sorted(arrays.keys() ^ others.keys())]
            arrays = {key: array for key, array in arrays.items() if key in others}
            others = {key: others[key] for key in arrays}
        # Gradients are sorted in the order of the backward pass.
        found_apart = differences(arrays, others, tolerance, left.layers)
        ordered = sorted(found_apart, key=forward_order, reverse=name == "gradients")
        quantities.append(Quantity(name, ordered, notes, remarks))
    return quantities


def _other_axes(left: Reference, right: Program) -> list[str]:
    """Returns a list with one message if any parameter has different logical axes on the two sides; otherwise []."""
    here, there = left.axes, axes_of(right)
    names = [name for name, axes in here.items() if name in there and tuple(axes) != tuple(there[name])]
    if not names:
        return []
    first = " against ".join(f"[{', '.join(map(str, side[names[0]]))}]" for side in (here, there))
    return [f"logical axes of {names[0]}: {first}" + (f", and of {len(names) - 1} more" if names[1:] else "")]


def _facts(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: (value, right[name]) for name, value in left.items() if name in right}
    return {name: same_text(*values) if name == measure.TEXT else values for name, values in both.items()}


def same_text(left: str, right: str) -> str:
    """Returns a phrase that describes whether two programs have the same text."""
    if left == right:
        return f"the same text, {len(left.splitlines()):,} lines"
    here, there = left.splitlines(), right.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    return f"another text from line {first + 1} of {len(here):,} on, against {len(there):,}"


def _head(left: Reference, sides: Sequence[Side], built: Sequence[Program]) -> list[tuple[str, str]]:
    """Returns a description of the comparison, as labels and texts: the properties that all sides have in common, and
    the keys whose values differ."""
    rows = [dict(left.head), *(head_of(program, left.head.get("data", "")) for program in built)]
    if len({row["model"] for row in rows}) > 1:
        for row in rows:
            row["model"] = row["model"].partition(": ")[2]  # the report has a separate line for decoder_block
    head = [(label, text) for label, text in rows[0].items() if all(other.get(label) == text for other in rows)]
    if "devices" not in dict(head):
        head.insert(0, ("devices", " | ".join(row.get("devices", "") for row in rows)))
    configs = [left.config, *(program.config for program in built)]
    named = all(side.name == combination(config) for side, config in zip(sides[1:], configs[1:], strict=True))
    named &= left.recorded or sides[0].name == combination(left.config)
    for key in differing_keys(sides):
        if not (named and key in FLAGS):
            values = [config[key] for config in configs]
            head.append((key, " | ".join(text if isinstance(text, str) and text else to_flow(text) for text in values)))
    return head
