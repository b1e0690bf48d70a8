"""Another allocator of memory in place of the C library's, which has to be there when a process starts."""

import os
import sys
from importlib import metadata
from pathlib import Path

PROXY = "libtbbmalloc_proxy.so.2"
_LIBRARIES = ("libtbbmalloc.so.2", PROXY)  # the second replaces malloc by what the first has
_HUGE_PAGES = "TBB_MALLOC_USE_HUGE_PAGES"


def start_again_with_fast_allocator() -> None:
    """Replaces this process by itself with the allocator of oneTBB, if the package tbb is installed.

    For a process that mostly compiles: TPU's compiler allocates so much that it takes a quarter less time with it
    (docs/benchmarks/ahead-of-time.md). Call it first thing in a program. Processes that this one starts get libc's
    allocator, as does this one where LD_PRELOAD is set, empty for example.
    """
    libraries = ":".join(_libraries())
    if libraries and os.environ.get("LD_PRELOAD") == libraries:  # started again
        del os.environ["LD_PRELOAD"], os.environ[_HUGE_PAGES]
    elif libraries and "LD_PRELOAD" not in os.environ:
        environment = {**os.environ, "LD_PRELOAD": libraries, _HUGE_PAGES: "1"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


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
