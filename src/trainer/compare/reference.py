"""The reference of a comparison: the left side, built by this command or read from a record. All sides start from the
reference's inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from trainer.compare import measure
from trainer.compare.difference import Layers
from trainer.compare.measure import Measured, Program, Shared, Snapshot
from trainer.config.errors import UserError
from trainer.config.files import by_hand
from trainer.config.keys import Config
from trainer.config.sides import Side
from trainer.data.batches import Batch
from trainer.data.dataset import open_dataset
from trainer.leaves.source import names_of
from trainer.models.names import names_of_blocks
from trainer.observe.banner import banner_rows
from trainer.ops.paths import whole_name
from trainer.sharding import LAYERS, leading, side_devices
from trainer.training.memory import check_memory, device_memory
from trainer.training.run import Run
from trainer.training.start import start

Say = Callable[[str], None]
# The type of `trainer.training.build.build`, and of functions that build runs with custom objectives or update rules.
Build = Callable[[Config, Sequence[jax.Device]], Run]
Step = Callable[[Program, Snapshot, Batch, Shared], Measured]

# Labels of the lines of a run's banner that a comparison prints, too.
_HEAD = ("devices", "model", "attention", "dtype", "batch", "data")


@dataclass(frozen=True)
class Reference:
    """The left side.

    Attributes:
      config: the configuration. It is resolved if this command builds the side; otherwise, it is the recorded
        configuration.
      rows: the number of rows of the batch.
      microbatch: the number of rows of a microbatch. For a record, it is the number of rows whose activations are
        recorded.
      head: a dict from labels to texts that describe the left side.
      axes: the logical axes of the parameters, by common name (see `trainer.models.names`).
      batch: the left side's next batch. All sides use this batch.
      layers: see `measure.Program.layers`; always returns None for a record.
      measured: a function that runs a measurement or, for a record, returns the recorded results of the measurement.
    """

    name: str
    config: Config
    rows: int
    microbatch: int
    head: Mapping[str, str]
    axes: Mapping[str, Sequence[str | None]]
    snapshot: Snapshot
    batch: Batch
    layers: Layers
    measured: Callable[[Step, Batch, Shared], Measured]
    recorded: bool = False


def build_side(side: Side, devices: Sequence[jax.Device], build: Build) -> Program:
    """Returns the program of a side. Raises UserError if the side does not fit the devices, or if PARAMETER_NAMES of
    the side's block contains a name that no parameter has."""
    config = side.loaded.config
    try:
        used = side_devices(config, devices)
        check_memory(config, used, device_memory(used))
        run = build(config, used)
        run.check_arguments()
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
            hint = "\n  XLA_FLAGS=--xla_force_host_platform_device_count=8 simulates 8 devices on this machine's CPU"
        raise UserError(f"{side.name}: {error}{hint}") from None


def reference(side: Side, program: Program, say: Say) -> Reference:
    """Returns `program`, which was built from `side`, as the reference. Its state and batch are those with which
    training would begin."""
    run = program.run
    dataset = open_dataset(Config({**run.config, "eval_interval": -1}), say)
    given = {key for key, where in side.loaded.changed.items() if by_hand(where)}
    scheduled = side.loaded.config.learning_rate_schedule_steps != -1
    begin = start(run, dataset, None, say, schedule_given=scheduled, given=given)
    stream = dataset.train_stream(begin.position, rows=run.rows)
    try:
        batch, _ = next(stream)
    finally:
        stream.close()

    def measured(step: Step, part: Batch, known: Shared) -> Measured:
        return step(program, snapshot, part, known).on_host()

    snapshot = measure.take(program, begin)
    data = str(dataset).partition("; ")[0]  # drops the part about held-out data
    return Reference(
        program.name,
        run.config,
        run.rows,
        microbatch_rows(program),
        head_of(program, data),
        axes_of(program),
        snapshot,
        batch,
        program.layers,
        measured,
    )


def microbatch_rows(program: Program) -> int:
    """Returns the number of rows of a microbatch over all devices."""
    return program.run.rows // program.config.gradient_accumulation_steps


def axes_of(program: Program) -> dict[str, Sequence[str | None]]:
    """Returns a dict from common names of parameters to their logical axes.

    In a pipeline, the single axis `layers` replaces the leading axes that stack the layers.
    """

    def by_layer(axes: Sequence[str | None]) -> Sequence[str | None]:
        return (LAYERS, *axes[leading(axes) :]) if leading(axes) else axes

    named = names_of(program.run.model.param_axes)
    return program.names.of({whole_name(name): by_layer(axes) for name, axes in named.items()})


def head_of(program: Program, data: str) -> dict[str, str]:
    """Returns a dict from labels to texts that describe a program. `data`: a description of the program's data."""
    device = program.run.mesh.devices.flat[0]
    rows: list[tuple[str, Any]] = banner_rows(
        program.config,
        device_kind=device.device_kind,
        platform=device.platform,
        process_count=1,
        parameters=program.run.parameters,
        dataset=data,
        run_dir=Path(),
    )
    return {label: text for label, text in rows if label in _HEAD}
