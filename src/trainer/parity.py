"""`python -m trainer.parity base.yml key=value ... left.KEY=VALUE right.KEY=VALUE`: compares two programs."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError, command_line, exit_on_user_error
from trainer.config.flags import COMBINATIONS, combination
from trainer.config.help import question
from trainer.config.paths import local_path
from trainer.config.sides import LEFT, Side, load_against, load_sides
from trainer.config.words import visible
from trainer.runtime.platforms import add_threads_for_simulated_devices, leave_out_absent_tpu

HELP = """\
usage: python -m trainer.parity [FILE.yml] [key=value ...] left.KEY=VALUE right.KEY=VALUE [rtol=X] [atol=X] [--json]
       python -m trainer.parity [FILE.yml] [key=value ...] record=FILE.safetensors [arrays=true]
       python -m trainer.parity left=FILE.safetensors [key=value ...] [right=NAME] [rtol=X] [atol=X] [--json]
       python -m trainer.parity CHECKPOINT CHECKPOINT [rtol=X] [atol=X] [--json]

Builds a program for each side from the shared keys and the side's keys, starts both from the left side's parameters,
gives both the left side's first batch, and compares parameters, activations by layer, loss, gradients, one update, and
an update of the same parameters with a random optimizer state that resembles the middle of a run.

left.KEY=VALUE   sets a key of base.yml on one side: flags, attention, remat_policy, dtype, the mesh, ...
right.KEY=VALUE  The keys for sources of parameters and batches cannot differ: both sides use the left side's.
left=NAME        selects a named combination of the flags for NNX and Linen on one side, and so does right=NAME;
                 right=NAME,NAME and right=all compare the left side with several combinations
record=FILE      writes a record of the left side: its configuration, batch, state and checksums of all compared arrays
arrays=true      The record also contains the arrays, so that a comparison with it reports the sizes of differences.
left=FILE        compares with a record, which may be from another commit, JAX version or machine; the configuration is
                 the record's, with the changes of key=value
CHECKPOINT       a run's folder, one of its checkpoints/N, or the output of trainer.export format=params
rtol, atol       tolerances: two arrays are equal if their elements differ by at most atol, or by at most rtol times the
                 largest magnitude in both; without tolerances, and always for integers, all bits must be equal
--json           print every array as JSON instead of the table

Exit code: 0 equal, 1 not equal, 2 an error in the command. FLOPs, memory and program text do not affect it.
--help SECTION and --explain KEY explain the keys, as in trainer.train.
A side with all mesh sizes given as numbers uses that many devices; other sides use all devices."""


@exit_on_user_error
def main(argv: Sequence[str] | None = None, **own: Any) -> None:
    """Runs the command line `argv` (default: the arguments of the process).

    `own`: more arguments of `training.build`, such as `make_objective`, which apply to all sides.
    """
    words = command_line(argv)
    if (asked := question(words)) and asked.section == "":
        print(HELP)
        return
    options, rest = _options(words)
    if "record" in options:
        _record(rest, options, own)
        return
    report = _compare(rest, options, own)
    if "--json" in words:
        print(json.dumps(report.to_json(), indent=1))
    else:
        from trainer.compare.table import table

        print(visible(table(report)))
    if not report.equal:
        raise SystemExit(1)


def _options(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the options that are not keys of base.yml, and the remaining arguments."""
    options: dict[str, Any] = {}
    rest = []
    for word in words:
        name, equals, text = word.partition("=")
        if equals and name in ("rtol", "atol"):
            options[name] = _number(word, text)
        elif equals and name == "arrays":
            if text not in ("true", "false"):
                raise UserError(f"{word}: allowed: true, false")
            options[name] = text == "true"
        elif equals and (name == "record" or (name == LEFT and text not in COMBINATIONS and _names_file(text))):
            options[name] = local_path(text)
        elif word != "--json":
            rest.append(word)
    if "arrays" in options and "record" not in options:
        raise UserError("arrays: this option applies only to a new record; add record=FILE.safetensors")
    if "record" in options and (other := options.keys() & {"rtol", "atol", LEFT} or {"--json"}.intersection(words)):
        raise UserError(f"record: recording a side compares nothing; leave out {', '.join(sorted(other))}")
    return options, rest


def _names_file(text: str) -> bool:
    return text.endswith(".safetensors") or "/" in text or Path(text).is_file()


def _number(word: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UserError(f"{word}: must be a non-negative number, such as 1e-5")
    return value


def _record(words: Sequence[str], options: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Records the program of the left side in a file."""
    left, *rights = load_sides(words, os.environ)
    if rights and {"right"}.intersection(word.partition("=")[0].partition(".")[0] for word in words):
        raise UserError("record: only the left side is recorded; leave out the arguments for the right side")
    left = replace(left, name=combination(left.loaded.config))
    _before([left])
    import jax

    _read_teachers([left])

    from trainer.compare.programs import record_program
    from trainer.observe.text import si
    from trainer.training.build import build

    path = options["record"]
    arrays = options.get("arrays", False)
    record_program(left, jax.devices(), path, _say, arrays=arrays, build=partial(build, **own))
    print(visible(f"{path}: {si(path.stat().st_size, 'B')}; python -m trainer.parity left={path} compares with it"))


def _compare(words: Sequence[str], options: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    given = {name: value for name, value in options.items() if name in ("rtol", "atol")}
    checkpoints = [word for word in words if "=" not in word and not word.startswith("-")]
    if len(checkpoints) == 2 and len(words) == 2:
        # Imports that load JAX come after the checks that do not need it.
        leave_out_absent_tpu()
        from trainer.compare.checkpoints import compare_checkpoints
        from trainer.compare.difference import Tolerance

        return compare_checkpoints(checkpoints[0], checkpoints[1], Tolerance(**given), _say)
    record = None
    if LEFT in options:
        leave_out_absent_tpu()
        from trainer.compare.record import Record

        record = Record(options[LEFT])
        if record.unknown:
            _say(f"ignored keys of the record, which this version does not have: {', '.join(record.unknown)}")
        if given and not record.has_arrays:
            raise UserError(
                f"{', '.join(given)}: {record.path} has checksums instead of arrays; record with arrays=true"
            )
        sides = load_against(record.side(), record.given, words, os.environ)
    else:
        sides = load_sides(words, os.environ)
    if len(sides) == 1:
        raise UserError(
            "nothing to compare: give left.KEY=VALUE or right.KEY=VALUE, left=NAME or right=NAME, left=RECORD, or two "
            "checkpoints; see python -m trainer.parity --help"
        )
    _before(sides)
    import jax

    _read_teachers(sides)

    from trainer.compare.difference import Tolerance
    from trainer.compare.programs import compare_programs
    from trainer.training.build import build

    return compare_programs(sides, jax.devices(), Tolerance(**given), _say, record, partial(build, **own))


def _before(sides: Sequence[Side]) -> None:
    """Prints the notes and warnings of all sides, and prepares the process for loading JAX.

    Raises:
      UserError: a side needs several processes.
    """
    for line in dict.fromkeys(line for side in sides for line in (*side.loaded.notes, *side.loaded.warnings)):
        _say(line)
    if any(side.loaded.config.num_processes > 0 for side in sides):
        raise UserError(
            "coordinator_address, num_processes, process_id: trainer.parity runs in one process; leave them out"
        )
    leave_out_absent_tpu()
    add_threads_for_simulated_devices()


def _read_teachers(sides: Sequence[Side]) -> None:
    from trainer.weights.teacher_files import with_teacher

    for side in sides:
        with_teacher(side.loaded)


def _say(line: str) -> None:
    print(visible(line), file=sys.stderr)


if __name__ == "__main__":
    main()
