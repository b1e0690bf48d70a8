"""Compares programs of several configurations with the first one, on the same parameters and batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections

from trainer.checkpoint import names_of
from trainer.compare import measure
from trainer.compare.difference import Tolerance, differences, forward_order
from trainer.compare.measure import Measured, Program, Snapshot
from trainer.compare.report import Comparison, Quantity, Report
from trainer.config import Side, UserError, combination, schema
from trainer.config import differences as differing_keys
from trainer.config.dump import PROCESSES, to_flow
from trainer.config.files import by_hand
from trainer.config.flags import FLAGS
from trainer.config.resume import AROUND, MAY_CHANGE
from trainer.data import Batch, Dataset, open_dataset
from trainer.models.names import names_of_blocks
from trainer.observe.banner import banner_rows
from trainer.sharding import side_devices
from trainer.state.host import KEYS
from trainer.training import build, start
from trainer.training.memory import check_memory, device_memory

Say = Callable[[str], None]

# Keys for the sources of parameters and tokens, which all sides take from the left one.
_COMMON = (
    "vocab_size",
    "load_parameters_path",
    "load_full_state_path",
    "reset_optimizer",
    "data_cache_directory",
    # Separate evaluation data changes which training documents are held out.
    "eval_split",
    "grain_eval_files",
    "hf_eval_split",
    "hf_eval_files",
)
# override_model_config never has an effect, and that is reported elsewhere.
_USED = {
    "model_name",
    "record_internal_nn_metrics",
    "parameter_metrics_period",
    "skip_step_scaling_factor",
    "override_model_config",
    *_COMMON,
}
_IDLE = frozenset((*AROUND, *PROCESSES, "debug_sharding")) - _USED
# In the order of a training step.
MEASURES = (measure.parameters, measure.activations, measure.gradients, measure.update)
# Rows of the banner that also describe a comparison.
_HEAD = ("devices", "model", "attention", "dtype", "batch", "data")


def compare_programs(sides: Sequence[Side], devices: Sequence[jax.Device], tolerance: Tolerance, say: Say) -> Report:
    """Builds each side's programs, runs them on the left side's parameters and batch, and compares the results.

    The devices hold the state and one program of one side at a time; the left side's results are on the host.

    Args:
      sides: the left side, followed by the sides to compare with it.
      devices: all devices. A side whose mesh sizes are all given takes as many as it needs; other sides take all.
      tolerance: applies to every array of every quantity.
      say: receives progress messages.

    Raises:
      UserError: a side does not fit the devices, or cannot take the left side's batch.
    """
    programs = [_program(side, devices) for side in sides]
    left, *rights = programs
    _check_common(left, rights)
    if idle := _idle(sides):
        say(
            f"{', '.join(idle)} have no effect here: a single process compares on its own devices, and nothing is "
            "written, evaluated or sampled"
        )
    dataset = open_dataset(ml_collections.FrozenConfigDict({**left.config, "eval_interval": -1}), say)
    snapshot, batch = _begin(sides[0], left, dataset, say)

    quantities: dict[str, list[Quantity]] = {program.name: [] for program in rights}
    facts: dict[str, dict[str, Any]] = {program.name: {} for program in rights}
    for step in MEASURES:
        rows = _activation_rows(programs) if step is measure.activations else left.run.rows
        part = {name: array[:rows] for name, array in batch.items()}
        known = measure.Shared()
        say(f"{left.name}: {step.__name__}")
        expected = step(left, snapshot, part, known).on_host()
        for program in rights:
            say(f"{program.name}: {step.__name__}")
            measured = step(program, snapshot, part, known)
            quantities[program.name] += _quantities(left, program, expected, measured, tolerance)
            facts[program.name] |= _facts(expected.facts, measured.facts)
    comparisons = [Comparison(right.name, quantities[right.name], facts[right.name]) for right in rights]
    return Report(left.name, tolerance, _head(sides, programs, dataset), comparisons)


def _idle(sides: Sequence[Side]) -> list[str]:
    """Returns the keys without effect here that the command line gives, or in which the sides differ.

    A yml may contain them, because it may be the yml of a training run.
    """
    given = {key for side in sides for key, where in side.loaded.changed.items() if by_hand(where)}
    idle = (given | differing_keys(sides).keys()) & _IDLE
    return [key for key in schema().keys if key in idle]


def _program(side: Side, devices: Sequence[jax.Device]) -> Program:
    config = side.loaded.config
    try:
        used = side_devices(config, devices)
        check_memory(config, used, device_memory(used))
        run = build(config, used)
        program = Program(side.name, run, names_of_blocks(run.config))
        if unused := program.names.unused(names_of(program.abstract.params)):
            raise UserError(
                f"PARAMETER_NAMES of decoder_block={run.config.decoder_block} names {unused[0]}, but the block has no "
                "such parameter"
            )
        return program
    except UserError as error:
        hint = ""
        if devices[0].platform == "cpu" and len(devices) == 1:
            hint = "\n  XLA_FLAGS=--xla_force_host_platform_device_count=8 makes 8 devices of this machine's CPU"
        raise UserError(f"{side.name}: {error}{hint}") from None


def _check_common(left: Program, rights: Sequence[Program]) -> None:
    """Rejects sides that cannot start from the left side's parameters and batch."""
    data = [key.name for key in schema().keys.values() if key.section == "Data" and key.name not in MAY_CHANGE]
    mistakes = [
        f"{program.name}: {key}=true: comparisons need the state on the device; leave the key out"
        for program in (left, *rights)
        for key in KEYS.values()
        if program.config[key]
    ]
    for right in rights:
        other = [key for key in (*data, *_COMMON) if left.config[key] != right.config[key]]
        if other:
            mistakes.append(
                f"{', '.join(other)}: different in {left.name} and {right.name}, but both get the same parameters and "
                "batch; give them without left. and right."
            )
        elif left.run.rows != right.run.rows:
            fitting = right.config.per_device_batch_size * left.run.rows / right.run.rows
            mistakes.append(
                f"{left.name} has {left.run.rows} rows in its batch and {right.name} has {right.run.rows}, but both "
                f"get the same batch; nearest for {right.name}: per_device_batch_size={fitting:.12g}"
            )
    if mistakes:
        raise UserError("\n  ".join(["these sides cannot be compared:", *mistakes]))


def _begin(side: Side, left: Program, dataset: Dataset, say: Say) -> tuple[Snapshot, Batch]:
    """Returns the common start: the left side's state on the host, and its next batch."""
    given = {key for key, where in side.loaded.changed.items() if by_hand(where)}
    scheduled = side.loaded.config.learning_rate_schedule_steps != -1
    begin = start(left.run, dataset, None, say, schedule_given=scheduled, given=given)
    stream = dataset.train_stream(begin.position, rows=left.run.rows)
    try:
        batch, _ = next(stream)
    finally:
        stream.close()
    return measure.take(left, begin), batch


def _activation_rows(programs: Sequence[Program]) -> int:
    """Returns the smallest number of rows that each side can shard like its microbatches."""
    return math.lcm(*(program.run.rows // program.config.gradient_accumulation_steps for program in programs))


def _quantities(left: Program, right: Program, expected: Measured, measured: Measured, tolerance: Tolerance) -> list:
    quantities = []
    for name, arrays in expected.arrays.items():
        others, notes, remarks = right.names.shaped(measured.arrays[name], arrays), [], []
        if name == "parameters":
            notes = _other_axes(left, right)
            if left.config.decoder_block != right.config.decoder_block:
                notes, remarks = [], notes  # each block chooses its own axis names
        elif name == "activations":
            # Each block chooses which activations it sows.
            remarks = [f"{path}: sown on one side only" for path in sorted(arrays.keys() ^ others.keys())]
            arrays = {key: array for key, array in arrays.items() if key in others}
            others = {key: others[key] for key in arrays}
        # The backward pass runs in reverse order.
        found_apart = differences(arrays, others, tolerance, left.layers)
        ordered = sorted(found_apart, key=forward_order, reverse=name == "gradients")
        quantities.append(Quantity(name, ordered, notes, remarks))
    return quantities


def _other_axes(left: Program, right: Program) -> list[str]:
    """Returns a message if common parameters have different logical axes."""
    here, there = (program.names.of(names_of(program.run.model.param_axes)) for program in (left, right))
    names = [name for name, axes in here.items() if name in there and axes != there[name]]
    if not names:
        return []
    first = " against ".join(f"[{', '.join(map(str, side[names[0]]))}]" for side in (here, there))
    return [f"logical axes of {names[0]}: {first}" + (f", and of {len(names) - 1} more" if names[1:] else "")]


def _facts(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: (value, right[name]) for name, value in left.items() if name in right}
    return {name: same_text(*values) if name == measure.TEXT else values for name, values in both.items()}


def same_text(left: str, right: str) -> str:
    """Returns, in words, whether two programs have the same text."""
    if left == right:
        return f"the same text, {len(left.splitlines()):,} lines"
    here, there = left.splitlines(), right.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    return f"another text from line {first + 1} of {len(here):,} on, against {len(there):,}"


def _head(sides: Sequence[Side], programs: Sequence[Program], dataset: Dataset) -> list[tuple[str, str]]:
    """Returns a description of the comparison: what the sides have in common, and the keys in which they differ."""
    rows: list[dict[str, str]] = []
    for program in programs:
        device = program.run.mesh.devices.flat[0]
        banner = banner_rows(
            program.config,
            device_kind=device.device_kind,
            platform=device.platform,
            process_count=1,
            parameters=program.run.parameters,
            dataset=str(dataset).partition("; ")[0],  # without the part on held-out data
            run_dir=Path(),
        )
        rows.append({label: text for label, text in banner if label in _HEAD})
    if len({row["model"] for row in rows}) > 1:
        for row in rows:
            row["model"] = row["model"].partition(": ")[2]  # decoder_block then has its own line
    head = [(label, text) for label, text in rows[0].items() if all(other[label] == text for other in rows)]
    if "devices" not in dict(head):
        head.insert(0, ("devices", " | ".join(row["devices"] for row in rows)))
    named = all(side.name == combination(program.config) for side, program in zip(sides, programs, strict=True))
    for key in differing_keys(sides):
        if not (named and key in FLAGS):
            values = [program.config[key] for program in programs]
            head.append((key, " | ".join(text if isinstance(text, str) and text else to_flow(text) for text in values)))
    return head
