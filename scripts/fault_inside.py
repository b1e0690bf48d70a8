"""Strikes a training process from within. The sitecustomize.py of scripts/fault_rounds.py calls `install`.

The variable FAULTS is a JSON object:
  folder  where marks are left: struck-N with the damaged file or the process that hangs, half-committed and
          counts-PROCESS.json; and samples, with a line for each row that was trained on
  run     the run's folder
  volume  a small file system with the run, which a full disk fills; "": it is simulated
  faults  a list of objects: kind, moment, process (null: any), call (the number of the call of the moment's function),
          delay (seconds from then), file (of the newest checkpoint's files in order: in [0, 1), to damage).
One fault strikes after the other, each once, in a start of its own. If the list is empty, the calls of each moment are
counted.
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
# The moments, and the function whose call is one. COMMIT is the end of the call. ANY_TIME begins with the process.
MOMENTS = {
    "preparation of data": "trainer.data.parts:write",
    "verification": "trainer.checkpoint.manager:verify",
    "restore": "trainer.training.start:_read",
    "step": "trainer.observe.goodput:Timeline.step",
    "batch": "trainer.data.streams:train_batch",
    "round": "trainer.rl.rollouts:Rollouts._make",
    "rewards": "trainer.rl.rewards:Rewards.__call__",
    "evaluation": "trainer.training.loop:evaluate",
    "row of metrics": "trainer.observe.appended:AppendedFile.append",
    "save": "trainer.checkpoint.manager:CheckpointManager.save",
    "sidecar": "trainer.checkpoint.sidecar:SidecarFiles._write",
    "checksums": "trainer.checkpoint.manager:write_sums",
    COMMIT: "trainer.checkpoint.manager:write_sums",
    "retention": "trainer.checkpoint.manager:expired",
    "deletion": "trainer.checkpoint.manager:remove_tree",
}
HANG = "hang"  # a wait without an end, in the function itself
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
FULL, BALLAST = "full disk", "ballast"
# Moments at which the disk is full for all writes from then on, and the bytes that a file may have. It is a limit of
# the system, so that threads in C++ fail, too. At the others, the function raises ENOSPC, once.
LIMITED = {"save": 4096, "row of metrics": 0}
DAMAGES = ("truncated", "removed")


def install() -> None:
    """Strikes in the processes of a run that the launcher has started, once they have read their command line."""
    index = next((word.partition("=")[2] for word in sys.orig_argv if word.startswith("process_id=")), None)
    if index is None:
        return
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
    """Leaves a mark if a committed checkpoint is not whole when process 0 starts."""
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
    """Calls `act` before each call of the moment's function; after it for COMMIT."""
    module, _, name = MOMENTS[moment].partition(":")
    *owners, name = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if moment == "sidecar":  # in the thread that awaits it
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
    """Appends to `file` the position after each batch of training data, and number and checksum of each row of it."""
    from trainer.training.batches import LoadedAhead

    take = LoadedAhead.take

    @functools.wraps(take)
    def noted(*args: Any) -> Any:
        batch, position = take(*args)
        fields = [batch[name] for name in sorted(batch.keys() - {"row"})]
        sums = [zlib.crc32(b"".join(field[i].tobytes() for field in fields)) for i in range(len(batch["row"]))]
        lines = [f"{position.get('row')} {row} {one}\n" for row, one in zip(batch["row"], sums, strict=True)]
        with contextlib.suppress(OSError), file.open("ab", buffering=0) as out:  # a full disk is no matter of this file
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
    elif kind in DAMAGES:
        _damage(kind, run, fault["file"], mark)
        if moment != "restore":
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.kill(os.getpid(), SIGNALS[kind])


def _damage(kind: str, run: Path, at: float, mark: Path) -> None:
    """Damages a file of the newest checkpoint, if there is one, and writes its path into `mark`."""
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
