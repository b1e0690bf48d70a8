"""Rewards of completions, by functions of a user, which run in other processes with a time limit.

A function is called as `function(prompts=[prompt], completions=[completion], NAME=[value], ...)`, with one sample and
the further columns of its record. It gets those that it takes: all with `**columns`. It returns a finite number, or a
list of one. It may start processes and threads. It must depend on its arguments only, and what it prints is discarded.
"""

import collections
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe, wait
from typing import Any, NamedTuple, Self

from trainer.config.errors import UserError, report, shortened
from trainer.config.words import visible

_LOOK_SECONDS = 0.5
START_SECONDS = 300  # for importing the functions
# What a worker does, if it does not score the sample of an index; and how a task has ended.
_IDLE, _START = -2, -1
_DONE, _LATE, _DIED = "done", "late", "died"
_PROGRAM = (
    "import json, sys; sys.path[:], *given = json.loads(sys.argv[1]); "
    "from trainer.rl.reward_worker import main; main(*given)"
)


class Sample(NamedTuple):
    """A completion to score.

    Attributes:
      prompt: text, or messages.
      columns: the further columns of the record, by name. None is called prompts or completions.
      where: its text names the record and the completion, for messages.
    """

    prompt: str | list[dict[str, Any]]
    completion: str
    columns: Mapping[str, Any]
    where: Any


class Scored(NamedTuple):
    """The rewards of a completion.

    Attributes:
      reward: the sum of `by_function`.
      by_function: in the order of the functions; 0.0 for those that did not end in time.
      timed_out: whether there are such.
    """

    reward: float
    by_function: tuple[float, ...]
    timed_out: bool


class Rewards:
    """A context in which samples are scored. When it ends, so do the workers and all processes that they started.

    What happens to a sample:
    - It takes too long: its worker is killed and replaced. The functions that were not done give 0.0, and the run goes
      on. The first such sample is named through `say`; all are counted by `Scored.timed_out`.
    - A function raises an exception, or returns something else than a number: a UserError names the first such sample.
    - Its worker dies, such as by a lack of memory: another worker tries once more; then it is a UserError.
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
          functions: package.module:function, imported as in this process, such as from the current folder.
          workers: the number of processes. Results do not depend on it.
          seconds: the time that all functions together may take for a sample.
          say: gets a line when a sample takes too long, the first time.
          key: what names the functions, for messages.
          meanwhile: is called at least twice a second while workers work; if it raises, they are killed.

        Raises:
          UserError: names each function that is not there or cannot be imported, with the reason.
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
        """Returns the rewards of `samples`, in their order.

        Raises:
          UserError: names the first sample that failed, the function and the reason.
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
                if failed:  # only an earlier sample would be named instead
                    waiting = collections.deque(index for index in waiting if index < min(failed))
        finally:
            for worker in [worker for worker in self._workers if worker.task >= 0]:
                self._drop(worker)
        if failed:
            raise UserError(_about(samples[min(failed)], failed[min(failed)]))
        return [scored[index] for index in range(len(samples))]

    def _fill(self) -> None:
        """Starts the workers that are missing."""
        while len(self._workers) < self._count:
            self._workers.append(_Worker(self._functions))

    def _finished(self) -> Iterator[tuple["_Worker", int]]:
        """Waits for busy workers, at most `_LOOK_SECONDS`, and yields those that have ended their task, with the task.

        They are idle again, or are no longer workers if they died or took too long.
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
                # A process that a dead worker has started may hold its connection.
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
                    f"{where}: the function {worker.function} was stopped after {self._seconds:g} s and gives 0. "
                    "Further such samples are only counted."
                )
            )
        rewards = (*map(float, worker.replies), *[0.0] * (len(self._functions) - len(worker.replies)))
        return Scored(sum(rewards), rewards, late)


def _about(sample: Sample, problem: str) -> str:
    """Returns the message about a sample that failed."""
    prompt = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1:]
    return visible(
        f"{sample.where}: the function {problem}\n  prompt: {shortened(str(prompt))}\n"
        f"  completion: {shortened(sample.completion)}"
    )


class _Worker:
    """A process that calls the functions (reward_worker.py), in a session of its own: Ctrl-C does not reach it.

    It is not one of `multiprocessing`: those import the program's main module again, and cannot have children.

    Attributes:
      task: the index of the sample that it scores, _START or _IDLE.
      replies: of each function that is done: its reward, or a text that says what failed.
      end: how the task has ended; "" before.
      deadline: when it has to end, a time of `time.monotonic`.
    """

    def __init__(self, functions: Sequence[str]):
        self._functions = functions
        self.connection, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()  # the system closes it when this process ends, in whatever way
        descriptors = (theirs.fileno(), lifeline)
        given = json.dumps([list(map(str, sys.path)), functions, *descriptors])
        # The hash seed: a function that goes through a set of texts does so in one order in all workers.
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
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
        """Sends a sample, which may take `seconds`."""
        self._expect(index, seconds)
        with suppress(OSError):  # a process that has died: `receive` notices it
            self.connection.send((sample.prompt, sample.completion, dict(sample.columns)))

    def receive(self) -> None:
        """Takes a reply, or notices that the process has died."""
        try:
            self.replies.append(json.loads(self.connection.recv_bytes()))
        except (EOFError, OSError):
            self.end = _DIED
        else:
            failed = self.task != _START and self.problem
            self.end = _DONE if failed or len(self.replies) == len(self._functions) else ""

    @property
    def function(self) -> str:
        """The function that is loaded or called."""
        return self._functions[len(self.replies)]

    @property
    def problem(self) -> str | None:
        """Why a sample has no reward; None if it has."""
        if self.end == _DIED:
            return f"{self.function} ended its process twice, {self.status()}"
        last = self.replies[-1] if self.replies else 0.0
        return f"{self._functions[len(self.replies) - 1]} {last}" if isinstance(last, str) else None

    def status(self) -> str:
        """Returns how the process, which was killed, has ended before, such as "with exit code 1"."""
        code = self.process.returncode
        if code >= 0:
            return f"with exit code {code}"
        name = signal.Signals(-code).name
        return f"by {name}{', as for a lack of memory' if name == 'SIGKILL' else ''}"

    def kill(self) -> None:
        """Ends the process and those that it started. It may be called twice."""
        if not self.connection.closed:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.connection.close()
            os.close(self._lifeline)
