"""What the compiler writes down on the way, of one compilation: the module after partitioning, and who holds memory.

    with tempfile.TemporaryDirectory() as folder, dump.uncached():
        try:
            compiled = lowered.compile(compiler_options=dump.options(folder))
        finally:  # the files are there too where the step does not fit
            texts = dump.read(folder)

The options are those of one compilation, so they need no environment variable before the backend starts.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

# Suffixes of the files' names; a TPU's and a CPU's compiler put different words before them.
_PARTITIONED = "after_*spmd-partitioning.before_*"
_OPTIMIZED = "after_optimizations.txt"
_ASSIGNMENT = "after_optimizations-buffer-assignment.txt"
_LIVE_RANGE = "after_optimizations-live-range.txt"


class Dump(NamedTuple):
    """Texts of one compilation; "" where the compiler wrote none: nothing is partitioned for one device."""

    partitioned: str
    optimized: str
    assignment: str
    live_range: str


def options(folder: str | Path) -> dict[str, str | bool]:
    """`compiler_options` that make a compilation write what `read` reads into `folder`."""
    return {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_pass_re": ".*spmd-partitioning",
    }


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Without JAX's cache of compiled programs: of a program from there the compiler writes no buffers down."""
    option = "jax_enable_compilation_cache"
    before = getattr(jax.config, option)  # the stubs lack it
    jax.config.update(option, False)
    compilation_cache.reset_cache()  # whether it is used is looked up once
    try:
        yield
    finally:
        jax.config.update(option, before)
        compilation_cache.reset_cache()


def read(folder: str | Path) -> Dump:
    """The texts that one compilation left in `folder`; a folder serves one compilation."""
    files = sorted(Path(folder).glob("*.txt"))

    def text(pattern: str) -> str:
        # Beside the step there may be small programs for a chip's other cores. Of those of the step's size the last
        # one: a program may be compiled again with other options after a first try.
        sizes = {path: path.stat().st_size for path in files if path.match(f"*{pattern}")}
        found = [path for path, size in sizes.items() if 2 * size >= max(sizes.values())]
        return found[-1].read_text() if found else ""

    return Dump(text(_PARTITIONED), text(_OPTIMIZED), text(_ASSIGNMENT), text(_LIVE_RANGE))
