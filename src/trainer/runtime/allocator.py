"""Another allocator of memory in place of the C library's, which has to be there when a process starts."""

import contextlib
import os
import sys
from importlib import metadata
from pathlib import Path

PROXY = "libtbbmalloc_proxy.so.2"
_LIBRARIES = ("libtbbmalloc.so.2", PROXY)  # the second replaces malloc by what the first has
_STARTED_AGAIN = "TRAINER_STARTED_AGAIN"  # names the variables that were added for it
_RESERVED_PAGES = Path("/proc/sys/vm/nr_hugepages")


def start_again_with_fast_allocator() -> None:
    """Replaces this process by itself with the allocator of oneTBB, if the package tbb is installed.

    For the main program, as its first statement: all that the process has done is gone, a script that came by standard
    input too. Nothing happens where LD_PRELOAD is set, empty for example. Processes that this one starts do not get
    the allocator. Why: docs/decisions/0011.
    """
    if added := os.environ.pop(_STARTED_AGAIN, ""):
        for name in added.split():
            os.environ.pop(name, None)
        return
    libraries = _libraries()
    if not libraries or not sys.executable or "LD_PRELOAD" in os.environ:
        return
    variables = {"LD_PRELOAD": ":".join(libraries)}
    if "TBB_MALLOC_USE_HUGE_PAGES" not in os.environ and not _has_reserved_pages():
        variables["TBB_MALLOC_USE_HUGE_PAGES"] = "1"
    environment = {**os.environ, **variables, _STARTED_AGAIN: " ".join(variables)}
    with contextlib.suppress(OSError):  # forbidden, say: then without
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _has_reserved_pages() -> bool:
    """Whether the machine keeps huge pages for programs that ask: oneTBB would take them, whoever they are for."""
    try:
        return int(_RESERVED_PAGES.read_text()) > 0
    except (OSError, ValueError):
        return True


def _libraries() -> list[str]:
    """Paths of the allocator's libraries in the order in which they are to be loaded; none where they are not."""
    try:
        files = metadata.files("tbb") if sys.platform == "linux" else None
    except metadata.PackageNotFoundError:
        return []
    paths = {file.name: os.path.abspath(file.locate()) for file in files or () if file.name in _LIBRARIES}
    found = [paths[name] for name in _LIBRARIES if name in paths and Path(paths[name]).exists()]
    splits = any(char.isspace() or char == ":" for path in found for char in path)  # LD_PRELOAD's separators
    return found if len(found) == len(_LIBRARIES) and not splits else []
