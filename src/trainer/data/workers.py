"""Calls a function for each numbered part of a task, in several local processes."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from trainer.config.errors import UserError
from trainer.data.cache import BEGUN_BY, Unfinished
from trainer.runtime.signals import die_with

Task = Callable[[int, Callable[[float], None]], object]  # arguments: part number, callback for the completed share
_LOOK = 0.5  # seconds between progress checks


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def possible() -> bool:
    """Returns whether Python can start worker processes. Workers import the main module, so it must not come from a
    pipe."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return path is None or main.__spec__ is not None or os.path.exists(path)


def run(task: Task, parts: Sequence[int], count: int, progress: Callable[[int, float], None]) -> None:
    """Calls the picklable function `task` for each of `parts` in `count` processes, which die with this process.
    Regularly calls `progress` with each part's number and completed share.

    Raises:
      UserError: `task` raised this error.
      Unfinished: a process died.
    """
    context = multiprocessing.get_context("spawn")
    shares = context.Array("d", max(parts) + 1, lock=False)
    others = {*multiprocessing.active_children()}
    pool = ProcessPoolExecutor(count, context, _begin, (task, shares, os.getpid()))
    os.environ[BEGUN_BY] = str(os.getpid())
    done = set()
    try:
        pending = {pool.submit(_call, part): part for part in parts}
        while pending:
            ended, _ = wait(pending, _LOOK, FIRST_COMPLETED)
            for future in ended:
                future.result()
                done.add(pending.pop(future))
            for part in parts:
                progress(part, 1.0 if part in done else shares[part])
    except BrokenProcessPool as error:
        raise Unfinished(
            "a process that prepares data died. If the memory is full, set a smaller prepare_workers. If this program "
            'lacks the guard `if __name__ == "__main__":`, add it, or set prepare_workers=1. The same command '
            "continues with the remaining parts"
        ) from error
    finally:
        del os.environ[BEGUN_BY]
        for process in {*multiprocessing.active_children()} - others:
            process.terminate()  # its unfinished part could take minutes; the next run redoes it
        pool.shutdown(cancel_futures=True)


_OF_WORKER: list[Any] = []  # in a worker: the task, and each part's completed share


def _begin(task: Task, shares: Any, parent: int) -> None:
    die_with(parent)
    del os.environ[BEGUN_BY]  # needed only while this process imports the main module
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers together already use all cores
    _OF_WORKER[:] = task, shares


def _call(part: int) -> None:
    task, shares = _OF_WORKER

    def track(share: float) -> None:
        shares[part] = share

    try:
        task(part, track)
    except UserError as error:
        raise UserError(str(error)) from None  # some subclasses of UserError cannot be pickled
