"""Disturbs runs with random faults, and compares each with an undisturbed run.

    python scripts/fault_rounds.py --rounds 30 dataset_type=synthetic steps=60 checkpoint_period=5 eval_interval=20
    python scripts/fault_rounds.py --processes 1,2,4 --results results.txt dataset_type=synthetic steps=60 ...

Every round starts a training run with the key=value arguments from scratch through scripts/launch_local.py, with one or
several processes that have one CPU device each. One of the FAULTS strikes one process, at a moment that
scripts/fault_inside.py defines. If the launcher does not restart the processes, the round follows the instructions in
the run's message and runs the same command again. The result is compared with an undisturbed run of as many processes:
the rows that were trained on, metrics.jsonl without its timing fields, every array of the last checkpoint, bit for bit,
and, with --module trainer.grpo, the completions. Every committed checkpoint must pass verification at each start and at
the end.

--processes 2:4 begins with two processes and continues with four after the first fault, on the same number of devices.
The rows must then be the same, but losses and arrays need only agree within LOSSES and ARRAYS. --processes 2:4 requires
the optimizer SGD, because other optimizers amplify the rounding errors of gradients near zero.

A full disk, a slow disk and a clock that jumps are simulated within the process. With --volume FOLDER, a small file
system that contains the runs is filled instead:
`unshare -Urm sh -c 'mount -t tmpfs -o size=32m none FOLDER && python scripts/fault_rounds.py --volume FOLDER ...'`.

A round is determined by its seed and the command line: `--seed 17 --rounds 1` repeats round 17. The moment "any time"
also depends on the duration of the undisturbed run, and "preparation of data" on which process prepared which part.
--results appends the result of each round to a file; rounds that the file reports as equal are not run again. If a
round fails, its folder is kept, the other rounds still run, and the exit code is 1.
"""

import argparse
import datetime
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fault_inside import ANY_TIME, BALLAST, CLOCK, DAMAGES, FULL, HANG, MOMENTS, SLOW

LAUNCHER = Path(__file__).with_name("launch_local.py")
RESTORING = ("verification", "restore")  # moments of a resumed run only, so a kill must end the run first
STARTING = ("preparation of data", *RESTORING)
EVERYWHERE = (ANY_TIME, *MOMENTS)
WRITING = ("preparation of data", "row of metrics", "save", "sidecar", "checksums")
DAMAGING = ("restore", "step", "evaluation", "save", "retention")
LIMITS = {"hang_timeout_seconds": 10, "hang_grace_seconds": 150}  # a start takes over 60 s on busy CPUs
SUPERVISED = ("supervise=true", *(f"{key}={seconds}" for key, seconds in LIMITS.items()))
TO_END = 30  # a hanging process and all others must have ended this many seconds after the limit
# Maps each moment at which a process can hang to a regular expression for the phases that its supervisor may name.
HANGING = {
    "step": r"step \d+",
    "batch": r"step \d+ \(data\)|step \d+ \(rollouts\)",  # in trainer.grpo, a batch of prompts
    "round": r"step \d+ \(rollouts\)",
    "rewards": r"step \d+ \(rollouts\)|evaluation",
    "evaluation": "evaluation",
    "save": "save",
    "checksums": "save|end",  # the next save or the end of the run waits for the checksums
}
# Maps each fault to the moments at which it can strike, and to the exit code, besides 0, with which the launcher may
# end after the fault.
FAULTS: dict[str, tuple[Sequence[str], int]] = {
    "kill": (EVERYWHERE, 0),
    "term": (EVERYWHERE, 128 + signal.SIGTERM),
    "stop": (EVERYWHERE, 0),
    HANG: (list(HANGING), 0),
    CLOCK: (EVERYWHERE, 2),  # Orbax measures the limit of a save with this clock
    FULL: (WRITING, 2),
    SLOW: (sorted({*WRITING, *DAMAGING}), 0),
    **dict.fromkeys(DAMAGES, (DAMAGING, 2)),
}
LIMIT = 900  # seconds after which a launcher must have ended
# Maximum differences after a change of the number of processes, relative for numbers above 1.
LOSSES = 3e-6  # of all floats in the metrics
ARRAYS = 1e-5  # of the arrays of the last checkpoint
NOT_REACHED = "equal, but not reached"  # the result of a round whose fault did not strike
DELAY = 0.1  # maximum seconds from a call to the fault


class Outcome(NamedTuple):
    """The result of a run.

    Attributes:
      rows: the metrics without timing fields.
      arrays: the arrays of the last checkpoint, and the completions.
      samples: a line for each row that was trained on.
    """

    rows: list[dict]
    arrays: dict[str, Any]
    samples: set[str]


class Undisturbed(NamedTuple):
    """A run without a fault: its outcome, its duration, and how often each process reached each moment."""

    outcome: Outcome
    seconds: float
    counts: list[dict[str, int]]


class Round(NamedTuple):
    """A round, as its seed determines it.

    Attributes:
      seed: the seed.
      processes: number of processes at the start.
      then: number of processes after the first fault.
      faults: as in fault_inside.py. The last fault is under test. If there is one before it, that fault only ends the
        run, so that the run resumes.
    """

    seed: int
    processes: int
    then: int
    faults: list[dict[str, Any]]

    def __str__(self) -> str:
        last = self.faults[-1]
        process = "any process" if last["process"] is None else f"process {last['process']}"
        then = "" if self.then == self.processes else f" (then {self.then})"
        many = f"process{'' if self.processes == 1 else 'es'}{then}"
        at = f"{last['moment']} (call {last['call']}, after {last['delay']:.2f} s)"
        return f"seed {self.seed}: {self.processes} {many}, {last['kind']} in {process} at {at}"


def drawn(
    seed: int,
    processes: Sequence[tuple[int, int]],
    kinds: Sequence[str],
    known: Callable[[int, int], Undisturbed],
    moments: Sequence[str] = EVERYWHERE,
) -> Round:
    """Returns the round of a seed. `processes`: the pairs to choose from, each with the number of processes at the
    start and the number after the first fault. `known`: a function that returns the undisturbed run for a pair."""
    draw = random.Random(seed)
    count, then = draw.choice(processes)
    kind, index = draw.choice(kinds), draw.randrange(min(count, then))
    whole = known(count, then)
    counts = whole.counts
    possible = [
        moment
        for moment in FAULTS[kind][0]
        if moment in moments and (moment in (ANY_TIME, *RESTORING) or any(counts[i].get(moment) for i in range(count)))
    ]
    moment = draw.choice(possible)
    if moment not in (ANY_TIME, *RESTORING) and not counts[index].get(moment):
        index = next(i for i in range(count) if counts[i].get(moment))
    calls = 1 if moment in (ANY_TIME, *RESTORING) else counts[index][moment]
    delay = draw.choice([0.0, draw.uniform(0, DELAY)])
    fault = {"kind": kind, "moment": moment, "process": index, "call": draw.randint(1, calls), "delay": delay}
    if moment == ANY_TIME:
        fault["delay"] = draw.uniform(0, whole.seconds)
    if moment == "preparation of data":
        fault["process"] = None  # whichever process comes first prepares the data
    if kind in (FULL, HANG, SLOW):
        fault["delay"] = 0.0  # the call itself fails
    # A kill after which the run resumes. It comes near the run's end, so that there is a checkpoint to resume from.
    first = {"kind": "kill", "moment": "step", "process": draw.randrange(count), "delay": 0.0}
    steps = counts[0]["step"]
    first["call"] = draw.randint(steps * 2 // 3, steps)
    fault["draw"] = draw.random()
    return Round(seed, count, then, [first, fault] if moment in RESTORING else [fault])


def launch(
    words: Sequence[str],
    folder: Path,
    processes: int,
    faults: Sequence[dict[str, Any]],
    module: str,
    *,
    devices: int = 1,
    restarts: int = 3,
    volume: str = "",
) -> tuple[int, str]:
    """Runs the launcher in `folder`. Returns its exit code and its output. `devices`: the number of devices per
    process."""
    inside = folder / "inside"
    inside.mkdir(parents=True, exist_ok=True)
    scripts = str(Path(__file__).parent.absolute())
    text = f"import sys\nsys.path.insert(0, {scripts!r})\nimport fault_inside\nfault_inside.install()\n"
    (inside / "sitecustomize.py").write_text(text)
    plan = {"folder": str(folder), "run": str(folder / "runs/run"), "volume": volume, "faults": faults}
    environment = os.environ | {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(inside)])),
        "FAULTS": json.dumps(plan),
    }
    command = [sys.executable, LAUNCHER, "-n", str(processes), "--devices", str(devices), "--all"]
    command += ["--restarts", str(restarts), "--logs", str(folder / "logs"), "--module", module]
    command += ["--", "base.yml", *words, f"base_output_directory={folder / 'runs'}"]
    with (folder / "log.txt").open("a+", encoding="utf-8", errors="replace") as log:
        before = log.tell()
        launcher = subprocess.Popen(
            [*command, "run_name=run"], stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder
        )
        try:
            launcher.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher did not end within {LIMIT} s") from None
        finally:
            launcher.terminate()  # the launcher ends its processes
            try:
                launcher.wait(60)
            except subprocess.TimeoutExpired:
                launcher.kill()
        log.seek(before)
        return launcher.returncode, log.read()


def outcome(folder: Path) -> Outcome:
    """Returns the outcome of the run in `folder`, with the arrays of its newest checkpoint."""
    from trainer.checkpoint.manager import newest
    from trainer.observe.metrics import METRICS_FILE, TIMING_FIELDS, read_rows

    [run] = (path for path in (folder / "runs").iterdir() if path.is_dir())
    rows = [{k: v for k, v in row.items() if k not in TIMING_FIELDS} for row in read_rows(run / METRICS_FILE)]
    checkpoint = newest(run)
    assert checkpoint is not None, f"{run} has no checkpoint"
    rollouts = {f"rollouts/{path.name}": path.read_bytes() for path in (run / "rollouts").glob("*")}
    noted = folder / "samples"
    samples = set(noted.read_text().splitlines()) if noted.exists() else set()
    return Outcome(rows, arrays_of(checkpoint) | rollouts, samples)


def arrays_of(checkpoint: Path) -> dict[str, Any]:
    """Returns a dict from name to array for a checkpoint, which may have been saved on any devices."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    from trainer.ops.paths import by_name

    path, one = checkpoint.absolute(), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns that it cannot describe the other items
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one),
        ocp.checkpointables_metadata(path).metadata["state"],
    )
    state = ocp.load_checkpointables(path, {"state": wanted})["state"]
    return {name: np.asarray(leaf) for name, leaf in by_name(state).items()}


def differences(left: Outcome, right: Outcome) -> list[str]:
    """Returns the differences between two outcomes, one line each; [] if they are bit-identical."""
    (rows, arrays, samples), (other_rows, other_arrays, other_samples) = left, right
    lines = [f"trained on other rows: {sorted(samples ^ other_samples)[:3]}"] if samples != other_samples else []
    lines += [f"{len(rows)} and {len(other_rows)} rows of metrics"] if len(rows) != len(other_rows) else []
    lines += [f"{a} and {b}" for a, b in zip(rows, other_rows, strict=False) if json.dumps(a) != json.dumps(b)][:3]
    names = arrays.keys() | other_arrays.keys()
    return lines + [f"array {name}" for name in sorted(names) if _bits(arrays, name) != _bits(other_arrays, name)]


def _bits(arrays: dict[str, Any], name: str) -> Any:
    found = arrays.get(name)
    return found.tobytes() if hasattr(found, "tobytes") else found


def distances(left: Outcome, right: Outcome) -> tuple[float, float]:
    """Returns two numbers: the largest difference of floats in the metrics, and the largest difference in the arrays.
    Differences are relative for numbers above 1.

    Raises:
      AssertionError: anything else differs.
    """
    import numpy as np

    assert left.samples == right.samples, f"trained on other rows: {sorted(left.samples ^ right.samples)[:3]}"
    assert [row.keys() for row in left.rows] == [row.keys() for row in right.rows]
    assert left.arrays.keys() == right.arrays.keys()

    def largest(pairs: list[tuple[Any, Any]]) -> float:
        each = [(np.asarray(a, float), np.asarray(b, float)) for a, b in pairs]
        return max(float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b)), initial=0.0)) for a, b in each)

    metrics = [(row[name], other[name]) for row, other in zip(left.rows, right.rows, strict=True) for name in row]
    for a, b in metrics:
        assert isinstance(a, float) or a == b, f"{a} and {b}"
    return largest(metrics), largest([(left.arrays[name], right.arrays[name]) for name in left.arrays])


def undisturbed(words: Sequence[str], folder: Path, processes: int, devices: int, module: str) -> Undisturbed:
    """Runs the command without a fault."""
    began = time.monotonic()
    code, said = launch(words, folder, processes, [], module, devices=devices)
    seconds = time.monotonic() - began
    assert code == 0, f"the undisturbed run ended with {code}:\n{said[-2000:]}"
    counts = [json.loads((folder / f"counts-{index}.json").read_text()) for index in range(processes)]
    return Undisturbed(outcome(folder), seconds, counts)


def disturbed(one: Round, words: Sequence[str], folder: Path, module: str, whole: Undisturbed, volume: str = "") -> str:
    """Runs a round in `folder`; with `volume`, the folders of the run and of its cache are in that file system. Returns
    the result in words.

    Raises:
      AssertionError: the run did not end as it should, or its outcome differs from that of `whole`.
    """
    kind, codes, mark = one.faults[-1]["kind"], [], folder / f"struck-{len(one.faults) - 1}"
    words = [*words, *(SUPERVISED if kind in ("stop", HANG, SLOW) else ())]
    for name in ("runs", "cache") if volume else ():
        place = Path(volume) / folder.name / name
        place.mkdir(parents=True)
        folder.mkdir(exist_ok=True)
        (folder / name).symlink_to(place)
    moves, devices = one.then != one.processes, max(one.then, one.processes)
    while not codes or codes[-1]:  # a finished run can still lose its last checkpoint
        count, here = one.then if codes else one.processes, 0 if moves and not codes else 3
        code, said = launch(
            words,
            folder,
            count,
            one.faults,
            module,
            devices=devices // count,
            restarts=here,
            volume=volume,
        )
        codes.append(code)
        if volume:
            (Path(volume) / BALLAST).unlink(missing_ok=True)
        expected = (code in (0, FAULTS[kind][1]) or not here) and len(codes) < 4
        assert expected, f"ended with {codes}: {said[-1500:]}"
        if remove := re.search(r"to continue from the previous checkpoint, remove (\S+)", said):
            shutil.rmtree(remove[1])
    obeyed = FAULTS["term"][1] in codes or kind != "term" or not mark.exists() or _late(one, whole)
    assert obeyed, f"SIGTERM was lost: ended with {codes}"
    text = mark.read_text() if kind in DAMAGES and mark.exists() else ""
    damaged = Path(text).relative_to(folder / "runs/run") if text else Path()
    check_checkpoints(folder, damaged.parts[1:2])
    if moves:
        losses, arrays = distances(whole.outcome, outcome(folder))
        assert losses <= LOSSES, f"metrics within {losses:.1e}"
        assert arrays <= ARRAYS, f"arrays within {arrays:.1e}"
        how = f"equal rows, metrics within {losses:.1e}, arrays within {arrays:.1e}"
    else:
        found = differences(whole.outcome, outcome(folder))
        assert not found, f"differs: {found}"
        how = "equal in every bit"
    how = how if mark.exists() else NOT_REACHED
    more = f", {damaged}" if damaged.parts else f", {hang(one, folder, mark)}" if kind == HANG and mark.exists() else ""
    return f"{how}, exit {', '.join(map(str, codes))}{more}"


def _late(one: Round, whole: Undisturbed) -> bool:
    """Returns whether the run may end before it handles the signal of this round."""
    fault = one.faults[-1]
    count = whole.counts[fault["process"] or 0].get(fault["moment"], 0)
    return fault["moment"] == ANY_TIME or (fault["moment"] not in STARTING and fault["call"] > 0.8 * count)


def hang(one: Round, folder: Path, mark: Path) -> str:
    """Returns, in words, the supervisor's report about the hanging process, and when all processes had ended.

    Raises:
      AssertionError: the report names another phase, or the processes ended too late.
    """
    [file] = (folder / "runs/run").glob(f"hang-*-{mark.read_text()}.txt")
    first, moment = file.read_text().partition("\n")[0], one.faults[-1]["moment"]
    found = re.fullmatch(rf"nothing .* s \((\w+)=\d+\) during ({HANGING[moment]})", first)
    assert found, f"hung at {moment}: {first}"
    starts = re.findall(r"---- started at (.*)", (folder / "logs/process-0.log").read_text())
    started = [datetime.datetime.fromisoformat(start).timestamp() for start in starts]
    # The launcher pauses for 1 s before the first restart. The log contains times in whole seconds.
    passed = min(start for start in started if start > mark.stat().st_mtime) - 1 - mark.stat().st_mtime
    assert passed < LIMITS[found[1]] + TO_END, f"ended after {passed:.0f} s"
    return f"named {found[2]}, {found[1]}={LIMITS[found[1]]}, all ended after {passed:.0f} s"


def check_checkpoints(folder: Path, damaged: Sequence[str]) -> None:
    """Raises AssertionError if a committed checkpoint that is not in `damaged` fails verification, if a committed
    checkpoint failed verification at a start of the run, or if anything else is left in the folder of checkpoints."""
    from trainer.checkpoint.manager import committed
    from trainer.checkpoint.sums import verify

    half, checkpoints = folder / "half-committed", folder / "runs/run/checkpoints"
    assert not half.exists(), f"half a checkpoint was committed: {half.read_text()}"
    for checkpoint in committed(checkpoints):
        if checkpoint.name not in damaged:
            verify(checkpoint)
    others = [path.name for path in checkpoints.iterdir() if not path.name.isdecimal()]
    assert not others, f"left in {checkpoints}: {others}"


def rounds(
    words: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    processes: Sequence[tuple[int, int]] = ((1, 1),),
    kinds: Sequence[str] = tuple(FAULTS),
    say: Callable[[str], Any] = print,
    module: str = "trainer.train",
    moments: Sequence[str] = EVERYWHERE,
    volume: str = "",
) -> int:
    """Runs the rounds of `seeds` in folders below `folder`, and passes a line about each to `say`. Returns the number
    of failed rounds."""
    wholes: dict[tuple[int, int], Undisturbed] = {}
    failed = 0

    def known(count: int, then: int) -> Undisturbed:
        devices = max(count, then) // count
        if (count, devices) not in wholes:
            here = folder / f"undisturbed-{count}-{devices}"
            wholes[count, devices] = undisturbed(words, here, count, devices, module)
        return wholes[count, devices]

    for seed in seeds:
        one = drawn(seed, processes, kinds, known, moments)
        here, began = folder / f"seed-{seed}", time.monotonic()
        try:
            result = disturbed(one, words, here, module, known(one.processes, one.then), volume)
            shutil.rmtree(here)
            shutil.rmtree(Path(volume or here) / here.name, ignore_errors=True)
        except Exception as error:
            failed += 1
            result = f"FAILED, see {here}: {type(error).__name__} {' '.join(str(error).split())}"
        say(f"{one}, {time.monotonic() - began:.0f} s: {result}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round; others have the next seeds")
    parser.add_argument("--processes", default="1", help="such as 1,2,2:4, of which a round draws one")
    parser.add_argument("--faults", default=",".join(FAULTS), help="faults to draw from; default: %(default)s")
    parser.add_argument("--moments", default=",".join(EVERYWHERE), help="moments to draw from; default: %(default)s")
    parser.add_argument("--results", type=Path, metavar="FILE", help="append the result of each round to it")
    parser.add_argument("--volume", default="", metavar="FOLDER", help="a small file system for the fault full disk")
    parser.add_argument("--module", default="trainer.train", help="the module to run, such as trainer.grpo")
    options, words = parser.parse_known_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    before = options.results.read_text() if options.results and options.results.exists() else ""
    same = " ".join([options.module, options.processes, options.faults, options.moments, *words])
    if before and before.partition("\n")[0] != same:
        parser.error(f"--results {options.results} belongs to another command: {before.partition(chr(10))[0]}")
    done = {int(seed) for seed in re.findall(r"^seed (\d+): .*: equal", before, re.MULTILINE)}

    missed = 0

    def say(line: str) -> None:
        nonlocal missed
        missed += NOT_REACHED in line
        print(line, flush=True)
        if options.results:
            with options.results.open("a") as file:
                file.write(f"{line}\n" if file.tell() else f"{same}\n{line}\n")

    seeds = [seed for seed in range(options.seed, options.seed + options.rounds) if seed not in done]
    counts = [[int(count) for count in pair.split(":")] for pair in options.processes.split(",")]
    processes = [(pair[0], pair[-1]) for pair in counts]
    if any(count != then for count, then in processes) and "opt_type=sgd" not in words:
        parser.error(f"--processes {options.processes} requires opt_type=sgd")
    folder = Path(tempfile.mkdtemp())
    kinds, moments = options.faults.split(","), options.moments.split(",")
    failed = rounds(words, seeds, folder, processes, kinds, say, options.module, moments, options.volume)
    print(f"{len(seeds)} rounds, {failed} failed, {missed} without their fault; {len(done)} were done before")
    if not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
