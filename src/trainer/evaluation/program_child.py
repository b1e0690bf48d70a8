"""Runs model-written code in a separate process. programs.py starts this file by its path, so that the process does not
import the package.

If the task's field `namespaces` is true, the process has no network, sees no other processes, and has no privileges
over its namespaces. All files are then read-only, except in an empty in-memory folder.
"""

import ast
import ctypes
import json
import os
import resource
import sys
from typing import Any

_FOLDER = "/dev/shm"  # replaced by an empty in-memory folder
_MS_BIND, _RECURSIVE, _HERE, _MOUNT_SETATTR, _NEW_USER = 4096, 0x8000, -100, 442, 0x10000000
_MOST_PROCESSES = "/proc/sys/kernel/pid_max"


def _isolate(hidden: str, megabytes: int) -> None:
    """Makes all files read-only, hides the file `hidden`, mounts a writable in-memory folder, and gives up all
    privileges."""
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = (ctypes.c_uint64 * 4)(1)  # read-only

    def done(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), "the kernel does not permit it")

    # RLIMIT_NPROC does not limit root, so pid_max limits the number of processes here. Linux before 6.14 has only one
    # pid_max for the whole machine, so it is not changed there.
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 14):
        with open(_MOST_PROCESSES, "w") as file:
            file.write("400")
    done(libc.mount(b"/dev/null", os.fsencode(hidden), None, ctypes.c_ulong(_MS_BIND), None))
    done(libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, ctypes.byref(attributes), ctypes.c_size_t(32)))
    done(libc.mount(b"tmpfs", _FOLDER.encode(), b"tmpfs", ctypes.c_ulong(0), f"size={megabytes}m,mode=700".encode()))
    os.chdir(_FOLDER)
    done(libc.unshare(_NEW_USER))


def main() -> None:
    """Loads the program in the first line of standard input, and calls its function with the arguments in each further
    line. Replies to each line on standard output (a socket): with the `repr` of the result or, if an exception is
    raised, with ! and the exception's name."""
    given = json.loads(sys.argv[1])
    os.setsid()  # otherwise, kill(0, ...) would signal the parent's process group, even if it is invisible here
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    seconds, size = given["seconds"], given["file_mb"] << 20
    limits: dict[int, tuple[int, int]] = {
        resource.RLIMIT_AS: (given["memory_mb"] << 20,) * 2,
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_FSIZE: (size, size),
        resource.RLIMIT_NPROC: (given["processes"],) * 2,
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
    }
    for number, pair in limits.items():
        resource.setrlimit(number, pair)
    if given["namespaces"]:
        _isolate(given["hidden"], given["file_mb"])
    ctypes.CDLL(None).prctl(1, 9)  # the kernel kills this process when its parent ends

    def reply(text: str) -> None:
        replies.write(text.encode(errors="backslashreplace") + b"\n")
        replies.flush()

    source, name = json.loads(calls.readline())
    named: dict[str, Any] = {"__name__": "program"}
    try:
        exec(compile(source, "program", "exec"), named)
        function = named[name]
        reply("None")
        for line in calls:
            by_place, by_name = ast.literal_eval(line.decode())
            reply(repr(function(*by_place, **by_name)))
    except BaseException as error:  # a program can raise any exception
        reply(f"!{type(error).__name__}")


main()
