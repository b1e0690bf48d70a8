"""`python -m trainer.train_compile [base.yml] compile_topology=v5e-256 key=value ...`: compiles the training step for
devices that are not present, reports its memory and cost, and saves the executable."""

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.capabilities.vocab_tiles import chosen
from trainer.config.effects import without_effect_here
from trainer.config.errors import UserError, command_line, exit_on_user_error
from trainer.config.help import prints_usage
from trainer.config.keys import Config
from trainer.config.load import begin
from trainer.config.paths import local_path
from trainer.config.topologies import Topology, find_topology
from trainer.runtime.platforms import prepare_to_compile

# A step that certainly needs more than this many times the devices' memory is not compiled, because libtpu would take
# minutes.
OUT_OF_PROPORTION = 64


class Compilation(NamedTuple):
    """A `training.run.Run`, its compiled step (None if it does not fit into memory), and the `aot.report.Report`."""

    run: Any
    compiled: Any
    report: Any


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    words = command_line(argv)
    if prints_usage("train_compile", words):
        return
    begun = begin(words, os.environ)
    prepare_to_compile(begun.config.compile_topology)
    # All checks that need only the command line are done. The following code loads JAX.
    from trainer.aot import executable
    from trainer.aot.report import DOES_NOT_FIT
    from trainer.aot.text import report_text, verdict
    from trainer.weights.model_of_command import with_model

    loaded = with_model(begun)
    if loaded.measures:
        raise UserError(
            "max_target_length is not set: a run that starts from a model derives it from its data, which this command "
            "does not read; set max_target_length=N to the value that the run prints when it starts"
        )
    for line in (*loaded.notes, *(f"warning: {warning}" for warning in loaded.warnings)):
        print(line, flush=True)
    run, compiled, report = compile_for_topology(loaded.config)
    for warning in without_effect_here(run.config, loaded.changed, loaded.config):
        print(f"warning: {warning}")
    for line in chosen(loaded.config, run.config):
        print(line)
    print(report_text(report), flush=True)
    if run.config.dump_hlo:
        print(f"XLA's dump of the training step is in {run.config.dump_hlo_local_dir}")
    if compiled is not None and run.config.compiled_trainstep_file:
        path = local_path(run.config.compiled_trainstep_file, "compiled_trainstep_file=")
        origin = executable.origin_of(run.config, list(run.mesh.devices.flat), run.abstract_args())
        executable.save(path, compiled, origin)
        print(f"wrote {path}")
    if run.config.compile_report_file:
        _write(local_path(run.config.compile_report_file, "compile_report_file="), report.as_dict())
    if report.fits is False:
        print(f"error: {verdict(report)}", file=sys.stderr)
        raise SystemExit(DOES_NOT_FIT)


def compile_for_topology(config: Config, compiler_options: Mapping[str, Any] | None = None) -> Compilation:
    """Compiles the step that `trainer.train` would run on the devices in `compile_topology`.

    A step that does not fit into memory is a result, not an error, unless it needs more than OUT_OF_PROPORTION times
    the memory.

    Args:
      config: from `config.load`, not resolved.
      compiler_options: further options of XLA.

    Raises:
      UserError: the configuration does not fit the devices, or there is no compiler for them.
    """
    from trainer.aot import dump
    from trainer.aot.chips import chip_of
    from trainer.aot.compilation import compile_step
    from trainer.aot.suggest import affordable
    from trainer.aot.topologies import devices_of, topology_of
    from trainer.training.build import build
    from trainer.training.memory import check_memory

    keep = dump.given_folder(config) if config.dump_hlo else None
    slices = config.compile_topology_num_slices
    devices = devices_of(topology_of(config), slices)
    chip = chip_of(devices[0].device_kind)
    check_memory(config, devices, chip.usable if chip else None, margin=OUT_OF_PROPORTION)
    run = build(config, devices)

    def traced() -> Any:
        return run.step.trace(*run.abstract_args())  # JAX caches the result

    compiled, report = compile_step(run, lambda: traced().lower(), slices, compiler_options, keep)
    if report.fits is False:
        report = _with_suggestions(report, config, run)
    elif report.fits:
        platform, needed = devices[0].platform, report.memory.peak
        if better := affordable(run.config, traced().jaxpr, platform, needed, report.hbm_bytes):
            report = dataclasses.replace(report, suggestions=(better,))
    return Compilation(run, compiled, report)


def _with_suggestions(report: Any, config: Config, run: Any) -> Any:
    from trainer.aot.suggest import suggest
    from trainer.config.resolve import resolve
    from trainer.sharding import compute_capability

    devices = list(run.mesh.devices.flat)

    def check(values: dict[str, Any]) -> None:
        topology = find_topology(values["compile_topology"])
        if not isinstance(topology, Topology):
            raise UserError(topology)
        slices = values["compile_topology_num_slices"]
        known = {"platform": topology.platform, "num_slices": slices, "capability": compute_capability(devices)}
        resolve(values, device_count=topology.devices * slices, **known)

    assert report.hbm_bytes is not None  # `fits` is None, not False, if the memory size is unknown
    suggestions = suggest(
        run.config,
        needed=max(report.memory.peak, report.hbm_bytes + 1),
        available=report.hbm_bytes,
        arguments=report.memory.arguments,
        check=check,
    )
    return dataclasses.replace(report, suggestions=suggestions)


def _write(path: Path, values: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"compile_report_file={path}: cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    gc.disable()  # saves 0.3 s of tracing; the process ends soon
    main()
