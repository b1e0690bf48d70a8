"""Calls a function for numbered parts in several processes of this machine."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from trainer.config.errors import UserError
from trainer.data.cache import Unfinished
from trainer.runtime.signals import die_with

Task = Callable[[int, Callable[[float], None]], object]  # of a part, and of a function that gets the share that is done
_LOOK = 0.5  # seconds between two looks at the progress


def run(task: Task, parts: Sequence[int], count: int, progress: Callable[[int, float], None]) -> None:
    """Calls `task`, which must be picklable, for each of `parts` in `count` processes, which die with this one.

    Raises:
      UserError: `task` raised this error; Unfinished: a process died.
    """
    context = multiprocessing.get_context("spawn")
    shares = context.Array("d", max(parts) + 1, lock=False)
    others = {*multiprocessing.active_children()}
    pool = ProcessPoolExecutor(count, context, _begin, (task, shares, os.getpid()))
    pending = {pool.submit(_call, part): part for part in parts}
    done = set()
    try:
        while pending:
            ended, _ = wait(pending, _LOOK, FIRST_COMPLETED)
            for future in ended:
                future.result()
                done.add(pending.pop(future))
            for part in parts:
                progress(part, 1.0 if part in done else shares[part])
    except BrokenProcessPool as error:
        raise Unfinished(
            "a process that prepares data died, perhaps because the memory is full: set a smaller prepare_workers; the "
            "same command continues with the remaining parts"
        ) from error
    finally:
        for process in {*multiprocessing.active_children()} - others:
            process.terminate()  # a part may take minutes, and the next run makes it again
        pool.shutdown(cancel_futures=True)


_OF_WORKER: list[Any] = []  # in a worker: the task, and the share of each part that is done


def _begin(task: Task, shares: Any, parent: int) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    _OF_WORKER[:] = task, shares


def _call(part: int) -> None:
    task, shares = _OF_WORKER

    def track(share: float) -> None:
        shares[part] = share

    try:
        task(part, track)
    except UserError as error:
        raise UserError(str(error)) from None  # some subclasses cannot be pickled
