"""Tasks with programs as answers, in HumanEval's format: a problem's tests call the function that the model wrote.

The function runs in a separate process (program_child.py). The tests run in the process that calls `judge`, a worker
for reward functions. The two processes exchange only Python literals, so a function cannot pass by returning an
object that equals every value. This module loads neither JAX nor trainer's configuration.
"""

import ast
import builtins
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PASSED, LATE = "passed", "took too long"
_FAILED, _ENDED, _OTHER, _LONG = "a test failed", "ended its process", "returned no plain value", "returned too much"
_RAISES = "the test raised an exception"
_RAISED = [name for name, one in vars(builtins).items() if isinstance(one, type) and issubclass(one, BaseException)]
# The possible outcomes of a program. Reward functions return a number, so `judge` returns an index into this tuple.
REASONS: tuple[str, ...] = (PASSED, LATE, _FAILED, _ENDED, _OTHER, _LONG, _RAISES, "raised an exception")
REASONS += tuple(f"raised {name}" for name in sorted(_RAISED))
LIMITS = {"seconds": 5, "memory_mb": 1024, "file_mb": 16, "processes": 16, "namespaces": True}
_LARGEST = 1 << 20  # the maximum size of a value, in bytes
_NAMESPACES = ["--user", "--map-root-user", "--net", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]


class _Failed(BaseException):  # no subclass of Exception, so that tests do not catch it
    """A program did not return a value. The argument is the reason."""


class _Program:
    """A process that runs a program. `close` ends the process."""

    def __init__(self, source: str, name: str, limits: Mapping[str, Any], folder: str):
        self._ours, theirs = socket.socketpair()
        self._deadline, self._rest = time.monotonic() + limits["seconds"], b""
        command = [sys.executable, "-I", "-B", str(Path(__file__).with_name("program_child.py")), json.dumps(limits)]
        if limits["namespaces"]:
            command = [shutil.which("unshare") or "unshare", *_NAMESPACES, "--", *command]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError:
            self._ours.close()
            raise _Failed(_ENDED) from None
        finally:
            theirs.close()
        self._source, self._name = source, name

    def load(self) -> None:
        """Defines the function. Raises _Failed if that fails."""
        self._reply(json.dumps([self._source, self._name]))

    def __call__(self, *by_place: Any, **by_name: Any) -> Any:
        """Calls the function and returns its result. Raises _Failed if the call does not return one."""
        return self._reply(repr((by_place, by_name)))

    def _reply(self, line: str) -> Any:
        try:
            self._wait()
            self._ours.sendall(line.encode() + b"\n")
            while b"\n" not in self._rest:
                self._wait()
                received = self._ours.recv(65536)
                self._rest += received
                if not received:
                    raise _Failed(_ENDED)
                if len(self._rest) > _LARGEST:
                    raise _Failed(_LONG)
        except TimeoutError:
            raise _Failed(LATE) from None
        except OSError:
            raise _Failed(_ENDED) from None
        text, self._rest = self._rest.split(b"\n", 1)
        if text.startswith(b"!"):
            reason = f"raised {text[1:].decode(errors='replace')}"
            raise _Failed(reason if reason in REASONS else "raised an exception")
        try:
            return ast.literal_eval(text.decode())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise _Failed(_OTHER) from None

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._ours.settimeout(left)

    def close(self) -> None:
        """Ends the process; with namespaces, also all processes that it started."""
        with contextlib.suppress(OSError):  # without namespaces, the process leads a process group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._ours.close()


def outcome(prompt: str, completion: str, test: str, name: str, limits: Mapping[str, Any]) -> str:
    """Runs the program `prompt` + `completion` against `test`. Returns one of REASONS.

    Args:
      test: source text that defines check(candidate).
      name: the function's name in the program.
      limits: a dict with values for the fields of LIMITS, and with the field `hidden`, the path of a file to hide from
        the program.
    """
    try:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            contextlib.closing(_Program(prompt + completion, name, limits, folder)) as program,
        ):
            program.load()
            # Tests may also call other functions that the prompt defines, so the prompt is executed in this process,
            # too.
            named: dict[str, Any] = {"__name__": "test"}
            exec(compile(f"{prompt}\n    pass\n", "prompt", "exec"), named)
            named[name] = program
            exec(compile(test, "test", "exec"), named)
            named["check"](program)
    except _Failed as failed:
        return str(failed)
    except AssertionError:
        return _FAILED
    except Exception:  # for example, because the test evaluates `text < number`
        return _RAISES
    return PASSED


def judge(
    completions: Sequence[str],
    question: Sequence[str],
    test: Sequence[str],
    entry_point: Sequence[str],
    limits: Sequence[Mapping[str, Any]],
) -> float:
    """Returns the index of the outcome in REASONS. Each parameter is a list with one value, as in reward functions."""
    return float(REASONS.index(outcome(question[0], completions[0], test[0], entry_point[0], limits[0])))
