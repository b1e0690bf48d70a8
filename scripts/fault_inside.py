"""Injects faults into a training process. The sitecustomize.py that scripts/fault_rounds.py writes calls `install`.

The environment variable FAULTS is a JSON object:
  folder  the folder for these files: struck-N is created when fault N strikes, and contains the path of the damaged
          file or the id of the hanging process; half-committed is created if a committed checkpoint is damaged;
          counts-PROCESS.json maps each moment to the number of its calls; samples has a line for each row that was
          trained on
  run     the run's folder
  volume  a small file system that contains the run, and that the fault "full disk" fills; "": the fault is simulated
  faults  a list of objects: kind, moment, process (null: any), call (which call of the moment's function, from 1),
          delay (seconds from that call to the fault), draw (a number in [0, 1) that determines the damaged file, as a
          fraction of the newest checkpoint's sorted files, or the jump of the clock)
Each fault strikes once, and each start of the run has only one fault: the first that has not yet struck. If the list of
faults is empty, the calls of each moment's function are counted instead.
"""

import atexit
import collections
import contextlib
import errno
import functools
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

ANY_TIME, COMMIT = "any time", "commit"
# Maps a moment to the function whose call is the moment; for COMMIT, the moment is the end of the call. ANY_TIME is not
# listed, because it has no function: its delay counts from the start of the process.
MOMENTS = {
    "preparation of data": "trainer.data.parts:write",
    "verification": "trainer.checkpoint.manager:verify",
    "restore": "trainer.training.start:_read",
    "step": "trainer.observe.goodput:Timeline.step",
    "batch": "trainer.data.streams:train_batch",
    "round": "trainer.rl.rollouts:Rollouts._make",
    "rewards": "trainer.rl.rewards:Rewards.__call__",
    "evaluation": "trainer.training.loop:evaluate",
    "row of metrics": "trainer.observe.metrics:MetricsWriter.write",
    "save": "trainer.checkpoint.manager:CheckpointManager.save",
    "sidecar": "trainer.checkpoint.sidecar:SidecarFiles._write",
    "checksums": "trainer.checkpoint.manager:write_sums",
    COMMIT: "trainer.checkpoint.manager:write_sums",
    "retention": "trainer.checkpoint.manager:expired",
    "deletion": "trainer.checkpoint.manager:remove_tree",
}
HANG = "hang"  # an endless wait, within the moment's function
# time.time() jumps, and stays ahead or behind in later starts; for half of the draws, SIGKILL follows after a second.
# `datetime`, the times of files and C++ code are not affected.
CLOCK = "clock"
JUMPS = (-86400.0, -60.0, 60.0, 3600.0, 86400.0, 365 * 86400.0)  # seconds
# From then on, each call of Python that opens, renames, removes or lists a file or folder of the run by its path waits.
# Reads, writes and C++ code do not.
SLOW, SLOWED = "slow disk", 0.1  # seconds of each wait
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
FULL, BALLAST = "full disk", "ballast"
# Maps a moment to the maximum bytes per file after a simulated full disk has struck at this moment. The operating
# system enforces this limit, so that writes of C++ threads fail, too. At other moments, the moment's function raises
# ENOSPC once.
LIMITED = {"save": 4096, "row of metrics": 0}
DAMAGES = ("truncated", "removed")


def install() -> None:
    """If scripts/launch_local.py has started this process, prepares its faults. They are armed only after the process
    has read its command line."""
    index = next((word.partition("=")[2] for word in sys.orig_argv if word.startswith("process_id=")), None)
    if index is None:
        return
    plan = json.loads(os.environ["FAULTS"])
    for number, fault in enumerate(plan["faults"]):
        before = Path(plan["folder"], f"struck-{number}").exists()
        if fault["kind"] == CLOCK and before and fault["process"] in (None, int(index)):
            _jump(fault["draw"])
    from trainer.runtime import distributed

    connect = distributed.distributed

    @contextlib.contextmanager
    def struck(config: Any) -> Iterator[None]:
        _arm(int(index))
        with connect(config):
            yield

    distributed.distributed = struck


def _arm(index: int) -> None:
    plan = json.loads(os.environ["FAULTS"])
    folder = Path(plan["folder"])
    if index == 0 and not any(fault["kind"] in DAMAGES for fault in plan["faults"]):
        _check_committed(Path(plan["run"]), folder)
    if not plan["faults"]:
        counts: collections.Counter[str] = collections.Counter()
        for moment in MOMENTS:
            _before(moment, functools.partial(counts.update, [moment]))
        atexit.register(lambda: (folder / f"counts-{index}.json").write_text(json.dumps(counts)))
    _note_samples(folder / "samples")
    marks = [(fault, folder / f"struck-{number}") for number, fault in enumerate(plan["faults"])]
    fault, mark = next(((fault, mark) for fault, mark in marks if not mark.exists()), ({"process": -1}, folder))
    if fault["process"] in (None, index):
        _prepare(fault, functools.partial(_strike, fault, mark, Path(plan["run"]), plan["volume"]))


def _check_committed(run: Path, folder: Path) -> None:
    """Writes the file half-committed if a committed checkpoint fails verification."""
    from trainer.checkpoint.manager import committed
    from trainer.checkpoint.sums import verify
    from trainer.config.errors import UserError

    for checkpoint in committed(run / "checkpoints"):
        try:
            verify(checkpoint)
        except UserError as error:
            (folder / "half-committed").write_text(str(error))


def _prepare(fault: dict[str, Any], strike: Callable[[], None]) -> None:
    left = fault["call"]

    def called() -> None:
        nonlocal left
        left -= 1
        if left == 0 and fault["delay"]:
            timer = threading.Timer(fault["delay"], strike)
            timer.daemon = True
            timer.start()
        elif left == 0:
            strike()

    if fault["moment"] == ANY_TIME:
        called()
    else:
        _before(fault["moment"], called)


def _before(moment: str, act: Callable[[], None]) -> None:
    """Replaces the moment's function by one that first calls `act`; for COMMIT, it calls `act` at the end."""
    module, _, name = MOMENTS[moment].partition(":")
    *owners, name = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if moment == "sidecar":  # an async function: act in the thread that awaits it
            return _awaited(act, function(*args, **kwargs))
        if moment != COMMIT:
            act()
        value = function(*args, **kwargs)
        if moment == COMMIT:
            act()
        return value

    setattr(owner, name, wrapped)


async def _awaited(act: Callable[[], None], then: Awaitable[Any]) -> Any:
    act()
    return await then


def _note_samples(file: Path) -> None:
    """Makes training append a line to `file` for each row of each batch: the position after the batch, and the number
    and checksum of the row."""
    from trainer.training.batches import LoadedAhead

    take = LoadedAhead.take

    @functools.wraps(take)
    def noted(*args: Any) -> Any:
        batch, position = take(*args)
        fields = [batch[name] for name in sorted(batch.keys() - {"row"})]
        sums = [zlib.crc32(b"".join(field[i].tobytes() for field in fields)) for i in range(len(batch["row"]))]
        lines = [f"{position.get('row')} {row} {one}\n" for row, one in zip(batch["row"], sums, strict=True)]
        with contextlib.suppress(OSError), file.open("ab", buffering=0) as out:  # ignore a full disk
            out.write("".join(lines).encode())
        return batch, position

    LoadedAhead.take = noted


def _strike(fault: dict[str, Any], mark: Path, run: Path, volume: str) -> None:
    try:
        mark.open("x").close()
    except FileExistsError:
        return
    kind, moment = fault["kind"], fault["moment"]
    if kind == FULL and volume:
        with contextlib.suppress(OSError), (Path(volume) / BALLAST).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    elif kind == FULL and moment in LIMITED:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMITED[moment], resource.RLIM_INFINITY))
    elif kind == FULL:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif kind == HANG:
        mark.write_text(str(os.getpid()))
        time.sleep(1e6)
    elif kind == CLOCK:
        _jump(fault["draw"])
        if fault["draw"] * len(JUMPS) % 1 < 0.5:
            timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
    elif kind == SLOW:
        sys.addaudithook(functools.partial(_slowed, str(run)))
    elif kind in DAMAGES:
        _damage(kind, run, fault["draw"], mark)
        if moment != "restore":
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.kill(os.getpid(), SIGNALS[kind])


def _jump(draw: float) -> None:
    jump, clock, clock_ns = JUMPS[int(draw * len(JUMPS))], time.time, time.time_ns
    time.time = lambda: clock() + jump
    time.time_ns = lambda: clock_ns() + int(jump * 1e9)


def _slowed(run: str, event: str, args: tuple[Any, ...]) -> None:
    """An audit hook, see SLOW."""
    if (event == "open" or event.startswith("os.")) and args and str(args[0]).startswith(run):
        time.sleep(SLOWED)


def _damage(kind: str, run: Path, at: float, mark: Path) -> None:
    """Damages a file of the newest checkpoint, if there is one, and writes the file's path into `mark`."""
    from trainer.checkpoint.manager import committed

    found = committed(run / "checkpoints")
    files = sorted(path for path in found[-1].rglob("*") if path.is_file()) if found else []
    if files:
        file = files[int(at * len(files))]
        mark.write_text(str(file))
        if kind == "removed":
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size // 2)
