"""What several processes agree on. Every process makes the same calls in the same order; one alone makes plain calls.

Not for the loop: each call waits for all processes. Threads other than the main one may not use these.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from trainer.config import UserError

T = TypeVar("T")


class AgreedError(UserError):
    """A UserError that every process raises at the same place, whichever had it first."""


def is_first() -> bool:
    """Whether this process is the one that writes what is written once."""
    import jax

    return jax.process_index() == 0


def from_first(fn: Callable[[], T]) -> T:
    """What `fn` returns in the first process, in all of them; the others do not call it. JSON must be able to say it.

    Raises:
      UserError: `fn` did.
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
    """What `fn` returns in this process, once it has returned in all of them. It may not itself wait for the others.

    Raises:
      UserError: it did in one of them.
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
    """Raises UserError where `value` differs between processes; `what` it is, for the message."""
    values = gather(value)
    other = next((i for i, found in enumerate(values) if found != values[0]), None)
    if other is not None:
        first, second = _differing(values[0], values[other]), _differing(values[other], values[0])
        raise AgreedError(
            f"{what} must be the same in every process: {first} in process 0, {second} in process {other}"
        )


def _differing(text: str, other: str) -> str:
    """The lines of `text` that `other` does not have."""
    lines = set(other.splitlines())
    return ", ".join(line for line in text.splitlines() if line not in lines)


def gather(text: str) -> list[str]:
    """The text of every process, in their order."""
    if _count() == 1:
        return [text]
    from jax.experimental.multihost_utils import process_allgather

    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.ravel(process_allgather(np.asarray(len(data), np.int32)))
    # Powers of two, so that few sizes are compiled.
    padded = np.zeros(max(1024, 1 << int(sizes.max()).bit_length()), np.uint8)
    padded[: len(data)] = data
    rows = process_allgather(padded)
    return [rows[i, :size].tobytes().decode() for i, size in enumerate(sizes)]


def _count() -> int:
    import jax

    return jax.process_count()
