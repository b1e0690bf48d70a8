"""Agreement between processes. All processes must make the same calls in the same order; a single process needs none.

Each call except `gather_later` waits for all processes, so do not call these functions in the training loop. Call them
only in the main thread.
"""

import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trainer.config.errors import UserError

T = TypeVar("T")

_SHOWN = 5  # lines of a text in a message
_LOST = re.compile(r"Gloo|NCCL|heartbeat|[Bb]arrier|coordination service|Time(d )?out (while )?waiting")


class AgreedError(UserError):
    """A UserError that every process raises at the same point, regardless of which process hit it first."""


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
    """Calls `fn`, waits until all processes returned from it, and returns its result. `fn` must not wait for others.

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


def check_same(values: Callable[[], Mapping[str, str]]) -> None:
    """Compares the texts of `values()`, by name, between the processes. A single process need not call it.

    Raises:
      UserError: texts differ. One message lists the differing lines, and the processes and hosts on both sides.
    """
    if _count() == 1:
        return
    texts = gather(json.dumps([platform.node(), agreed(values)]))
    (host, first), *others = map(json.loads, texts)
    problems = []
    for what, value in first.items():
        unlike = [(i, *other) for i, other in enumerate(others, 1) if other[1].get(what) != value]
        if unlike:
            index, other_host, other = unlike[0]
            more = f" and {len(unlike) - 1} more" if unlike[1:] else ""
            theirs = other.get(what, "")
            problems.append(
                f"{what} must be the same in every process: {_differing(value, theirs)} in process 0 ({host}), "
                f"{_differing(theirs, value)} in process {index} ({other_host}){more}"
            )
    if problems:
        raise AgreedError("\n  ".join(problems))


def _differing(text: str, other: str) -> str:
    """Returns the first lines of `text` that are not in `other`."""
    lines = set(other.splitlines())
    found = [line for line in text.splitlines() if line not in lines]
    return ", ".join([*found[:_SHOWN], *([f"{len(found) - _SHOWN} more"] if found[_SHOWN:] else [])]) or "nothing else"


def gather(text: str) -> list[str]:
    """Returns the texts of all processes, in process order."""
    if _count() == 1:
        return [text]
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.ravel(process_allgather(np.asarray(len(data), np.int32)))
    # Rounded up to a power of two, to limit the number of compiled sizes.
    padded = np.zeros(max(1024, 1 << int(sizes.max()).bit_length()), np.uint8)
    padded[: len(data)] = data
    rows = process_allgather(padded)
    return [rows[i, :size].tobytes().decode() for i, size in enumerate(sizes)]


def gather_later(numbers: Sequence[float]) -> Callable[[], Any]:
    """Starts to gather equally many numbers from each process. Returns a reader of the array [processes, numbers].

    The devices do this after already dispatched work, so the call does not wait. Read the result after a later step.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(_count(), -1), ("process", "device"))
    row = np.asarray([numbers], np.float32)
    with jax.transfer_guard_host_to_device("allow"):  # an intended transfer
        rows = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("process")), row)
    gathered = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(rows)
    return lambda: np.asarray(gathered.addressable_data(0))


def _same(x: Any) -> Any:
    return x


def lost_process(error: BaseException | None) -> bool:
    """Returns whether `error`, or one of its causes, means that another process of this run ended or does not respond.

    JAX and Orbax raise errors of several types for this; only the errors' texts identify it.
    """
    seen: list[BaseException] = []  # a chain of errors may be circular
    while error is not None and error not in seen and _count() > 1:
        if _LOST.search(str(error)):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _count() -> int:
    import jax

    return jax.process_count()
