"""`python -m trainer.parity base.yml key=value ... left.KEY=VALUE right.KEY=VALUE`: compares two programs."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from trainer.config import UserError, command_line, exit_on_user_error, load_sides, question
from trainer.config.words import visible
from trainer.runtime.platforms import add_threads_for_simulated_devices, leave_out_absent_tpu

HELP = """\
usage: python -m trainer.parity [FILE.yml] [key=value ...] left.KEY=VALUE right.KEY=VALUE [rtol=X] [atol=X] [--json]
       python -m trainer.parity CHECKPOINT CHECKPOINT [rtol=X] [atol=X] [--json]

Builds a program for each side from the shared keys and the side's own keys, starts both from the left side's
parameters, gives both the left side's first batch, and compares parameters, activations by layer, loss, gradients, one
update, and an update of the same parameters with an optimizer state that is drawn to resemble the middle of a run.

left.KEY=VALUE   a key of base.yml on one side: flags, attention, remat_policy, dtype, the mesh, ...
right.KEY=VALUE  The keys for sources of parameters and batches cannot differ: both sides use the left side's.
left=NAME        a combination of the three flags by name, also right=NAME; right=NAME,NAME and right=all: several
CHECKPOINT       a run's folder, one of its checkpoints/N, or the output of trainer.export format=params
rtol, atol       tolerances: two arrays are equal if their elements differ by at most atol, or by at most rtol times the
                 largest magnitude in both; without them, and for integers, only equal bits are equal
--json           print every array as JSON instead of the table

Exit code: 0 equal, 1 not equal, 2 an error in the command. FLOPs, memory and program text do not affect it.
--help SECTION and --explain KEY answer about the keys, as in trainer.train.
A side whose mesh sizes are all given as numbers takes that many devices; other sides take all devices."""


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    words = command_line(argv)
    if (asked := question(words)) and asked.section == "":
        print(HELP)
        return
    tolerance, as_json, rest = _options(words)
    report = _compare(rest, tolerance)
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        from trainer.compare.table import table

        print(visible(table(report)))
    if not report.equal:
        raise SystemExit(1)


def _options(words: Sequence[str]) -> tuple[dict[str, float], bool, list[str]]:
    """Returns the tolerances, whether to print JSON, and the remaining words."""
    tolerance: dict[str, float] = {}
    rest = []
    for word in words:
        name, equals, text = word.partition("=")
        if equals and name in ("rtol", "atol"):
            tolerance[name] = _number(word, text)
        elif word != "--json":
            rest.append(word)
    return tolerance, "--json" in words, rest


def _number(word: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UserError(f"{word}: must be a non-negative number, such as 1e-5")
    return value


def _compare(words: Sequence[str], given: dict[str, float]) -> Any:
    checkpoints = [word for word in words if "=" not in word and not word.startswith("-")]
    if len(checkpoints) == 2 and len(words) == 2:
        # Imports that load JAX come after the checks that do not need it.
        leave_out_absent_tpu()
        from trainer.compare import Tolerance, compare_checkpoints

        return compare_checkpoints(checkpoints[0], checkpoints[1], Tolerance(**given), _say)
    sides = load_sides(words, os.environ)
    if len(sides) == 1:
        raise UserError(
            "nothing to compare: give left.KEY=VALUE or right.KEY=VALUE, left=NAME or right=NAME, or two checkpoints; "
            "see python -m trainer.parity --help"
        )
    for line in dict.fromkeys(line for side in sides for line in (*side.loaded.notes, *side.loaded.warnings)):
        _say(line)
    if any(side.loaded.config.num_processes > 0 for side in sides):
        raise UserError(
            "coordinator_address, num_processes, process_id: trainer.parity runs in one process; leave them out"
        )
    leave_out_absent_tpu()
    add_threads_for_simulated_devices()
    import jax

    from trainer.compare import Tolerance, compare_programs

    return compare_programs(sides, jax.devices(), Tolerance(**given), _say)


def _say(line: str) -> None:
    print(visible(line), file=sys.stderr)


if __name__ == "__main__":
    main()
