"""The worker program that calls a user's reward functions. `trainer.rl.rewards` starts it.

It starts within a few hundredths of a second, because it imports neither JAX nor the package's configuration.
"""

import inspect
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from trainer.data.functions import failure, load_function

Function = Callable[..., Any]
_LARGEST = 3.4e38  # about the largest float32, the dtype in which the trainer stores rewards


def main(paths: list[str], connection: int, lifeline: int) -> None:
    """Loads the functions that `paths` names, then scores samples until the parent process closes the connection.

    Receives pickled samples (prompt, completion, columns). After it loads or calls a function, it sends one JSON value:
    a number (the reward; 0 after loading), or a text that describes the failure. It never sends a pickle, because a
    completion could make a function produce a malicious pickle.

    Args:
      connection: the file descriptor of a socket.
      lifeline: the file descriptor of the read end of a pipe; see `_end_with`.
    """
    _end_with(lifeline)
    # Only the parent ends a worker, so the handlers do nothing. SIG_IGN would be inherited by programs that a function
    # starts.
    ending = (signal.SIGINT, signal.SIGTERM)
    for number in ending:
        signal.signal(number, lambda number, frame: None)
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in ending])
    os.set_inheritable(connection, False)
    with Connection(connection) as parent:
        functions = []
        for path in paths:
            try:
                functions.append(load_function(path))
                inspect.signature(functions[-1])
                result: float | str = 0.0
            except (ImportError, TypeError, ValueError) as error:
                result = str(error)
            _send(parent, result)
        while True:
            try:
                sample = parent.recv()
            except EOFError:
                return
            for function in functions:
                result = _score(function, *sample)
                _send(parent, result)
                if isinstance(result, str):
                    break


def _end_with(lifeline: int) -> None:
    """Makes the kernel end this process and its children when the parent ends, even if they are busy.

    The parent holds the write end of the pipe `lifeline` and never writes to it, so the kernel sends SIGIO when the
    parent ends. A thread that reads the pipe would not suffice, because a regular expression that never terminates
    blocks all Python threads. On systems other than Linux, a worker ends only after its current sample.
    """
    os.set_inheritable(lifeline, False)
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())  # the process group, which this process leads
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)  # send SIGIO, which by default ends a process
        if select.select([lifeline], [], [], 0)[0]:
            sys.exit("the parent has ended")


def _send(parent: Connection, result: float | str) -> None:
    parent.send_bytes(json.dumps(result).encode())


def _score(function: Function, prompt: Any, completion: str, columns: Mapping[str, Any]) -> float | str:
    """Returns the result of `function` for a sample, or a description of the failure."""
    try:
        given = dict({name: [value] for name, value in columns.items()}, prompts=[prompt], completions=[completion])
        first, named = _arguments(function, given)
        return _number(function(*first, **named))
    except BaseException as error:  # a user's function can raise any exception
        entered = error.__traceback__ is not None and error.__traceback__.tb_next is not None
        there = "" if entered else f"; it can take prompts, completions{''.join(f', {name}' for name in columns)}"
        return f"failed: {failure(error)}{there}"


def _arguments(function: Function, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the positional and the keyword arguments for `function`: the entries of `given` that it accepts.

    Arguments are passed by name, because some functions have no parameter `prompts`. If a function has at
    least two positional parameters, but none called `prompts` or `completions`, the prompts and the completions are its
    first two positional arguments.
    """
    parameters = inspect.signature(function).parameters.values()
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    by_place = ["prompts", "completions"] if len(places) > 1 and names.isdisjoint(("prompts", "completions")) else []
    takes_any = any(each.kind == each.VAR_KEYWORD for each in parameters)
    named = {name: value for name, value in given.items() if name not in by_place and (takes_any or name in names)}
    return [given[name] for name in by_place], named


def _number(value: Any) -> float | str:
    """Converts a function's result for one sample to a float. If that is impossible, returns an error text."""
    one = value.tolist() if hasattr(value, "tolist") else value  # arrays of NumPy, JAX and PyTorch
    if isinstance(one, list | tuple) and len(one) == 1:
        one = one[0].tolist() if hasattr(one[0], "tolist") else one[0]
    if isinstance(one, int | float) and abs(one) <= _LARGEST:
        return float(one)
    return f"returned {repr(value)[:400]}; it must return a finite number (float32), or a list of one number"
