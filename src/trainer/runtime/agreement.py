"""Agreement between processes. All processes must make the same calls in the same order; a single process needs none.

Each call waits for all processes, so do not call these functions in the training loop. Call them only in the main
thread.
"""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from trainer.config.errors import UserError

T = TypeVar("T")

_LOST = re.compile(r"Gloo|NCCL|heartbeat|[Bb]arrier|coordination service|Time(d )?out (while )?waiting")


class AgreedError(UserError):
    """A UserError that every process raises at the same point, whichever process hit it first."""


def is_first() -> bool:
    """Returns whether this is process 0, which writes the files and messages that all processes share."""
    import jax

    return jax.process_index() == 0


def from_first(fn: Callable[[], T]) -> T:
    """Calls `fn` only in process 0, and returns its result, which must be JSON-serializable, in every process.

    Raises:
      UserError: `fn` raised it.
    """
    if _count() == 1:
        return fn()
    value: Any = None
    problem = ""
    if is_first():
        try:
            value = fn()
        except UserError as error:
            problem = str(error)
    answer = json.loads(gather(json.dumps([problem, value]))[0])
    if answer[0]:
        raise AgreedError(answer[0])
    return answer[1]


def agreed(fn: Callable[[], T]) -> T:
    """Calls `fn`, waits until it has returned in all processes, and returns its result. `fn` must not wait for others.

    Raises:
      UserError: `fn` raised it in one of the processes.
    """
    if _count() == 1:
        return fn()
    value: Any = None
    problem = ""
    try:
        value = fn()
    except UserError as error:
        problem = str(error)
    problems = gather(problem)
    if any(problems):
        index, first = next((i, text) for i, text in enumerate(problems) if text)
        raise AgreedError(first if all(problems) else f"process {index} of {len(problems)}: {first}")
    return value


def check_same(what: str, value: str) -> None:
    """Raises UserError if `value` differs between processes; `what` names it in the message."""
    values = gather(value)
    other = next((i for i, other_value in enumerate(values) if other_value != values[0]), None)
    if other is not None:
        first, second = _differing(values[0], values[other]), _differing(values[other], values[0])
        raise AgreedError(
            f"{what} must be the same in every process: {first} in process 0, {second} in process {other}"
        )


def _differing(text: str, other: str) -> str:
    """Returns the lines of `text` that are not in `other`."""
    lines = set(other.splitlines())
    return ", ".join(line for line in text.splitlines() if line not in lines)


def gather(text: str) -> list[str]:
    """Returns the texts of all processes, in process order."""
    if _count() == 1:
        return [text]
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.ravel(process_allgather(np.asarray(len(data), np.int32)))
    # Rounded up to a power of two, which limits the number of compiled sizes.
    padded = np.zeros(max(1024, 1 << int(sizes.max()).bit_length()), np.uint8)
    padded[: len(data)] = data
    rows = process_allgather(padded)
    return [rows[i, :size].tobytes().decode() for i, size in enumerate(sizes)]


def lost_process(error: BaseException | None) -> bool:
    """Returns whether `error`, or an error before it, says that another process of this run ended or does not answer.

    JAX and Orbax raise errors of several types for it; only the texts tell.
    """
    seen: list[BaseException] = []  # the errors before an error may form a circle
    while error is not None and error not in seen and _count() > 1:
        if _LOST.search(str(error)):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _count() -> int:
    import jax

    return jax.process_count()
