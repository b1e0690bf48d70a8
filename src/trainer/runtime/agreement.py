"""Agreement between the processes of a run.

`is_first` and `lost_process` do not communicate. All processes must call the other functions in the same order, and
only in the main thread. Of these, call only `gather_later` in the training loop, because the others wait for all
processes. In a single-process run, no function communicates.
"""

import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trainer.config.errors import UserError

T = TypeVar("T")

_SHOWN = 5  # the maximum number of lines of a text in a message
_LOST = re.compile(r"Gloo|NCCL|heartbeat|[Bb]arrier|coordination service|Time(d )?out (while )?waiting")


class AgreedError(UserError):
    """A UserError that every process raises at the same point, even if the cause occurred in only one of them."""


def is_first() -> bool:
    """Returns whether this is process 0, which writes files and messages on behalf of all processes."""
    import jax

    return jax.process_index() == 0


def from_first(fn: Callable[[], T]) -> T:
    """Calls `fn` only in process 0, and returns the result of `fn` in every process. The result must be
    JSON-serializable.

    Raises:
      UserError: in every process, if `fn` raised it.
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
    """Calls `fn`, waits until it has returned in all processes, and returns this process's result.

    `fn` must not wait for other processes.

    Raises:
      UserError: in every process, if `fn` raised it in at least one.
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
    """Checks that `values()`, a dict from names to texts, is the same in all processes.

    Raises:
      UserError: a text differs between processes. The message lists the differing lines, processes and hosts.
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
    """Returns the first lines of `text` that `other` does not contain, as one line for a message."""
    lines = set(other.splitlines())
    found = [line for line in text.splitlines() if line not in lines]
    return ", ".join([*found[:_SHOWN], *([f"{len(found) - _SHOWN} more"] if found[_SHOWN:] else [])]) or "nothing else"


def gather(text: str) -> list[str]:
    """Returns the argument `text` of each process, in the order of the processes."""
    if _count() == 1:
        return [text]
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.ravel(process_allgather(np.asarray(len(data), np.int32)))
    # The size is rounded up to a power of two, so that programs for only a few sizes are compiled.
    padded = np.zeros(max(1024, 1 << int(sizes.max()).bit_length()), np.uint8)
    padded[: len(data)] = data
    rows = process_allgather(padded)
    return [rows[i, :size].tobytes().decode() for i, size in enumerate(sizes)]


def gather_later(numbers: Sequence[float]) -> Callable[[], Any]:
    """Starts to gather numbers from all processes, equally many from each. Returns a function that returns the gathered
    numbers.

    The gathered numbers are an array [processes, numbers]. `gather_later` does not wait: the devices gather the numbers
    after the work that is already dispatched. The returned function does wait, so call it only after a later step.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(_count(), -1), ("process", "device"))
    row = np.asarray([numbers], np.float32)
    with jax.transfer_guard_host_to_device("allow"):  # this transfer is intended
        rows = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("process")), row)
    gathered = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(rows)
    return lambda: np.asarray(gathered.addressable_data(0))


def _same(x: Any) -> Any:
    return x


def lost_process(error: BaseException | None) -> bool:
    """Returns whether `error`, or one of its causes, shows that another process of this run has ended or does not
    respond.

    JAX and Orbax report a lost process by errors of several types, so the texts of the errors are searched.
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
