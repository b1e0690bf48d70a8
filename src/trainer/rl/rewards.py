"""Scores completions with a user's reward functions, which run in separate processes with a time limit.

A function is called for one sample at a time, as `function(prompts=[prompt], completions=[completion], NAME=[value],
...)`. Each NAME is another column of the sample's record. The function gets only the arguments that it accepts, or all
of them if it has a parameter `**columns`. It must return a finite number, or a list of one finite number. The result
must depend only on the arguments. The function may start processes and threads. Its output is discarded. Its temporary
files go to a folder that is deleted when the worker ends.
"""

import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe, wait
from typing import Any, NamedTuple, Self

from trainer.config.errors import UserError, report, shortened
from trainer.config.words import visible

_LOOK_SECONDS = 0.5
START_SECONDS = 300  # time limit for importing the functions
# The first line has the values of `_Worker.task` for a worker that is not scoring a sample; the second line, the values
# of `_Worker.end` for a task that has ended.
_IDLE, _START = -2, -1
_DONE, _LATE, _DIED = "done", "late", "died"
_PROGRAM = (
    "import json, sys; sys.path[:], *given = json.loads(sys.argv[1]); "
    "from trainer.rl.reward_worker import main; main(*given)"
)


class Sample(NamedTuple):
    """A completion to score.

    Attributes:
      prompt: a text, or a list of messages.
      columns: the other columns of the record, by name. No column may be called prompts or completions.
      where: `str(where)` identifies the record and the completion in messages.
    """

    prompt: str | list[dict[str, Any]]
    completion: str
    columns: Mapping[str, Any]
    where: Any


class Scored(NamedTuple):
    """The rewards of a completion.

    Attributes:
      reward: the sum of `by_function`.
      by_function: the reward of each function, in order; 0.0 for functions that did not finish in time.
      timed_out: whether a function did not finish in time.
    """

    reward: float
    by_function: tuple[float, ...]
    timed_out: bool


class Rewards:
    """A context that scores samples in worker processes. Its exit kills the workers and all processes they started.

    Failures of a sample:
    - Scoring it takes too long: its worker is killed and replaced, and the rewards of the unfinished functions are 0.0.
      `say` gets a message about the first of these samples; `Scored.timed_out` marks all of them.
    - A function raises an exception or does not return a number: a UserError names the first failed sample.
    - The worker that scores it dies, for example out of memory: another worker retries the sample. If that worker dies
      too, UserError is raised.
    """

    def __init__(
        self,
        functions: Sequence[str],
        workers: int,
        seconds: float,
        say: Callable[[str], None] = lambda line: None,
        key: str = "reward_functions",
        meanwhile: Callable[[], None] = lambda: None,
    ):
        """Starts the workers, which import the functions.

        Args:
          functions: the functions, as package.module:function. Workers import them with the `sys.path` of this process.
          workers: the number of processes, which does not affect results.
          seconds: the time limit of a sample, for all functions together.
          say: gets a message about the first sample that takes too long.
          key: the configuration key that lists the functions, for messages.
          meanwhile: called at least twice a second while workers are busy; if it raises, the busy workers are killed.

        Raises:
          UserError: functions are missing or cannot be imported. The message lists each with the reason.
        """
        self._functions, self._count, self._seconds, self._say = tuple(functions), workers, seconds, say
        self._said, self._key, self._meanwhile = False, key, meanwhile
        self._workers: list[_Worker] = []
        try:
            self._fill()
            while any(worker.task == _START for worker in self._workers):
                for worker, _ in self._finished():
                    self._check_start(worker)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the workers and the processes that they started."""
        while self._workers:
            self._workers.pop().kill()

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        """Returns the rewards of `samples`, in the same order.

        Raises:
          UserError: a sample failed. The message names the first failed sample, the function and the reason.
        """
        waiting = collections.deque(range(len(samples)))
        scored: dict[int, Scored] = {}
        failed: dict[int, str] = {}
        died: set[int] = set()
        try:
            while waiting or any(worker.task >= 0 for worker in self._workers):
                self._fill()
                for worker in self._workers:
                    if waiting and worker.task == _IDLE:
                        index = waiting.popleft()
                        worker.begin(index, samples[index], self._seconds)
                for worker, index in self._finished():
                    if index == _START:
                        self._check_start(worker)
                    elif worker.end == _DIED and index not in died:
                        died.add(index)
                        waiting.appendleft(index)
                    elif problem := worker.problem:
                        failed[index] = problem
                    else:
                        scored[index] = self._scored(worker, samples[index].where)
                if failed:  # the error names the first failed sample, so only samples before it matter
                    waiting = collections.deque(index for index in waiting if index < min(failed))
        finally:
            for worker in [worker for worker in self._workers if worker.task >= 0]:
                self._drop(worker)
        if failed:
            raise UserError(_about(samples[min(failed)], failed[min(failed)]))
        return [scored[index] for index in range(len(samples))]

    def _fill(self) -> None:
        """Starts workers until the configured number runs."""
        while len(self._workers) < self._count:
            self._workers.append(_Worker(self._functions))

    def _finished(self) -> Iterator[tuple["_Worker", int]]:
        """Waits at most `_LOOK_SECONDS` for busy workers. Yields a pair for each worker that ended its task: the
        worker, and the value of `task` for that task.

        A yielded worker is idle again, or has been removed if it died or took too long.
        """
        self._meanwhile()
        at_work = [worker for worker in self._workers if worker.task != _IDLE]
        first = min(worker.deadline for worker in at_work)
        ready = wait([worker.connection for worker in at_work], min(_LOOK_SECONDS, max(0, first - time.monotonic())))
        now = time.monotonic()
        for worker in at_work:
            if worker.connection in ready:
                worker.receive()
            elif worker.deadline <= now:
                # If a child process of a dead worker keeps the connection open, only the deadline reveals that the
                # worker is dead.
                worker.end = _LATE if worker.process.poll() is None else _DIED
            if worker.end:
                task, worker.task = worker.task, _IDLE
                if worker.end != _DONE:
                    self._drop(worker)
                yield worker, task

    def _drop(self, worker: "_Worker") -> None:
        worker.kill()
        self._workers.remove(worker)

    def _check_start(self, worker: "_Worker") -> None:
        """Raises UserError if a worker could not import the functions."""
        mistakes = [f"{path}: {text}" for path, text in zip(self._functions, worker.replies, strict=False) if text]
        if worker.end == _LATE:
            mistakes.append(
                f"{worker.function}: importing it takes more than {START_SECONDS} s; its module must do less"
            )
        elif worker.end == _DIED:
            mistakes.append(f"{worker.function}: the process that imports it ended {worker.status()}")
        if mistakes:
            raise report([visible(f"{self._key}={mistake}") for mistake in mistakes])

    def _scored(self, worker: "_Worker", where: Any) -> Scored:
        late = worker.end == _LATE
        if late and not self._said:
            self._said = True
            self._say(
                visible(
                    f"{where}: the function {worker.function} was stopped after {self._seconds:g} s; its reward is 0. "
                    "Further timeouts are only counted."
                )
            )
        rewards = (*map(float, worker.replies), *[0.0] * (len(self._functions) - len(worker.replies)))
        return Scored(sum(rewards), rewards, late)


def _about(sample: Sample, problem: str) -> str:
    """Returns the error message for a failed sample. `problem`: the function's name, and its failure."""
    prompt = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1:]
    return visible(
        f"{sample.where}: the function {problem}\n  prompt: {shortened(str(prompt))}\n"
        f"  completion: {shortened(sample.completion)}"
    )


class _Worker:
    """A process that runs `trainer.rl.reward_worker`. It is in a separate session, so Ctrl-C does not reach it.

    It is not a `multiprocessing` process, which would import the main module again and could not have children.

    Attributes:
      task: the index of the sample that the process scores, _START while it imports the functions, or _IDLE.
      replies: the result of each finished function: its reward, or a text that describes the failure.
      end: how the task ended (_DONE, _LATE or _DIED); "" while it runs.
      deadline: the `time.monotonic` time at which the task must have ended.
    """

    def __init__(self, functions: Sequence[str]):
        self._functions = functions
        self.connection, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()  # the kernel closes `_lifeline` when this process ends for any reason
        descriptors = (theirs.fileno(), lifeline)
        given = json.dumps([list(map(str, sys.path)), functions, *descriptors])
        # With a fixed hash seed, all workers iterate over a set of strings in the same order.
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
        # This folder is deleted with the worker, because a killed function does not delete its temporary files.
        environment["TMPDIR"] = self._temporary = tempfile.mkdtemp(prefix="functions-")
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=descriptors,
                env=environment,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(lifeline)
        self._expect(_START, START_SECONDS)

    def _expect(self, task: int, seconds: float) -> None:
        self.task, self.end, self.deadline = task, "", time.monotonic() + seconds
        self.replies: list[float | str] = []

    def begin(self, index: int, sample: Sample, seconds: float) -> None:
        """Sends `sample`, the sample number `index`, to the process, which must score it within `seconds`."""
        self._expect(index, seconds)
        with suppress(OSError):  # if the process has died, `receive` detects this
            self.connection.send((sample.prompt, sample.completion, dict(sample.columns)))

    def receive(self) -> None:
        """Receives a reply, or detects that the process has died. Updates `replies` and `end`."""
        try:
            self.replies.append(json.loads(self.connection.recv_bytes()))
        except (EOFError, OSError):
            self.end = _DIED
        else:
            failed = self.task != _START and self.problem
            self.end = _DONE if failed or len(self.replies) == len(self._functions) else ""

    @property
    def function(self) -> str:
        """The name (package.module:function) of the function that is being loaded or called."""
        return self._functions[len(self.replies)]

    @property
    def problem(self) -> str | None:
        """Why the worker could not score the sample: a function's name, and its failure. None if no function has
        failed."""
        if self.end == _DIED:
            return f"{self.function} ended its process twice, {self.status()}"
        last = self.replies[-1] if self.replies else 0.0
        return f"{self._functions[len(self.replies) - 1]} {last}" if isinstance(last, str) else None

    def status(self) -> str:
        """Returns how the process ended, such as "with exit code 1". Call it after `kill`."""
        code = self.process.returncode
        if code >= 0:
            return f"with exit code {code}"
        name = signal.Signals(-code).name
        return f"by {name}{', perhaps out of memory' if name == 'SIGKILL' else ''}"

    def kill(self) -> None:
        """Kills the process and the processes that it started. It may be called twice."""
        if not self.connection.closed:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.connection.close()
            os.close(self._lifeline)
            shutil.rmtree(self._temporary, ignore_errors=True)
