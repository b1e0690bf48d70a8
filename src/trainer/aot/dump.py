"""XLA's dumps of one compilation: the module after partitioning, the optimized module, buffers and live ranges.

    with tempfile.TemporaryDirectory() as folder, dump.uncached():
        try:
            compiled = lowered.compile(compiler_options=dump.options(folder))
        finally:  # the files exist even if the step does not fit
            texts = dump.read(folder)

The options apply to one compilation, so no environment variable needs to be set before the backend starts.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.runtime.storage import why_not_writable

# Suffixes of the file names; the prefixes differ between the TPU compiler and the CPU compiler.
_PARTITIONED = "after_*spmd-partitioning.before_*"
_OPTIMIZED = "after_optimizations.txt"
_ASSIGNMENT = "after_optimizations-buffer-assignment.txt"
_LIVE_RANGE = "after_optimizations-live-range.txt"


class Dump(NamedTuple):
    """The dumps of one compilation. A text is "" if the compiler did not write the corresponding file. For a single
    device, the compiler does not write `partitioned`."""

    partitioned: str
    optimized: str
    assignment: str
    live_range: str


def options(folder: str | Path) -> dict[str, str | bool]:
    """Returns `compiler_options` that make the compiler write into `folder` the files that `read` expects."""
    return {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_pass_re": ".*spmd-partitioning",
    }


def given_folder(config: Config) -> Path:
    """Creates and returns the folder that `dump_hlo_local_dir` names. Raises UserError if it is not writable."""
    folder = local_path(config.dump_hlo_local_dir, "dump_hlo_local_dir=")
    why = why_not_writable(folder)
    try:
        if not why:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror
    if why:
        raise UserError(
            f"dump_hlo_local_dir={config.dump_hlo_local_dir}: cannot be written ({why}); name another folder"
        )
    return folder


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Disables JAX's compilation cache, because the compiler dumps nothing for a cached program."""
    option = "jax_enable_compilation_cache"
    before = getattr(jax.config, option)  # missing in the stubs
    jax.config.update(option, False)
    compilation_cache.reset_cache()  # makes JAX read the option again
    try:
        yield
    finally:
        jax.config.update(option, before)
        compilation_cache.reset_cache()


def read(folder: str | Path) -> Dump:
    """Returns the texts that one compilation wrote into `folder`. The folder must contain no other dumps."""
    files = sorted(Path(folder).glob("*.txt"))

    def text(pattern: str) -> str:
        # The compiler may also dump small programs for a chip's other cores, so ignore dumps below half the size of the
        # largest. Take the last of the remaining dumps, because the compiler may retry with other options.
        sizes = {path: path.stat().st_size for path in files if path.match(f"*{pattern}")}
        largest = [path for path, size in sizes.items() if 2 * size >= max(sizes.values())]
        return largest[-1].read_text() if largest else ""

    return Dump(text(_PARTITIONED), text(_OPTIMIZED), text(_ASSIGNMENT), text(_LIVE_RANGE))
