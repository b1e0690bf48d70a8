"""Counts the large programs that each folder's tests make, and limits their number.

A program counts where JAX lowers and compiles it, even if it then comes from the compilation cache. Reading it from the
cache takes half as long as compiling it, and tracing and lowering take longer than compiling (972 and 806 s in a run of
the usual tests). So the numbers do not depend on what an earlier run or the other worker left in the cache. Programs
with the same text count once in a folder, whichever worker makes them.

Small programs do not count, although they took a quarter of the compile time in unit/optim/test_groups.py. Most are
single operations outside of `jit`, and the first folder of a process that needs one makes it for all others.

Each run of the whole suite prints the numbers. A run of the usual tests with at most two workers, like the README's
command, fails if a folder exceeds its limit.
"""

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import compiler
import pytest
from whole import is_whole

# Each limit is the number of 2026-12-01 in the README's command plus a fifth or plus 10, and plus a third for
# unit/inference, unit/layers, unit/products and unit/training. In that command a folder reuses programs that other
# folders made in the same process, so its number depends on the order of the tests.
LIMITS = {
    "integration": 424,
    "unit/aot": 20,
    "unit/calibration": 24,
    "unit/checkpoint": 16,
    "unit/compare": 33,
    "unit/docs": 33,
    "unit/evaluation": 22,
    "unit/inference": 318,
    "unit/layers": 174,
    "unit/linen": 37,
    "unit/models": 147,
    "unit/objectives": 81,
    "unit/ops": 209,
    "unit/optim": 76,
    "unit/products": 328,
    "unit/serving": 28,
    "unit/sharding": 34,
    "unit/state": 77,
    "unit/training": 203,
    "unit/weights": 108,
}
OTHERS = 10  # for any other folder
SMALL = 1000  # bytes of MLIR; an operation of jax.numpy has 300 to 800
SLOWEST = 30, 2.0  # a whole run lists this many tests that take at least this many seconds
_TOO_MANY = (
    "{folder} has made {made} large programs and may make {limit}: give tests equal configurations and shapes, so "
    "that they share programs, or raise the limit in tests/programs.py with a reason"
)


class Programs:
    """The plugin: collects digests of large programs by test folder, over all workers."""

    def __init__(self) -> None:
        self.made: defaultdict[str, set[str]] = defaultdict(set)
        self.folder = "collection"
        self.workers = 0

    def observe(self, module: Any) -> None:
        text = io.BytesIO()
        module.operation.write_bytecode(text)  # takes less than 1 % of the compile time
        if len(text.getvalue()) > SMALL:
            self.made[self.folder].add(hashlib.blake2b(text.getvalue(), digest_size=8).hexdigest())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.folder = item.nodeid.partition("::")[0].removeprefix("tests/").rpartition("/")[0]
        return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.workers += 1
        for folder, programs in getattr(node, "workeroutput", {}).get("programs", {}).items():
            self.made[folder].update(programs)

    def limits(self, config: pytest.Config) -> dict[str, int]:
        """Returns the limit of each folder, or nothing if the limits do not apply to this run."""
        if not is_whole(config) or config.option.tests != "usual" or self.workers > 2:
            return {}
        return {folder: LIMITS.get(folder, OTHERS) for folder in self.made}

    def above(self, config: pytest.Config) -> list[str]:
        return [folder for folder, limit in sorted(self.limits(config).items()) if len(self.made[folder]) > limit]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["programs"] = {folder: list(programs) for folder, programs in self.made.items()}
        elif session.exitstatus == pytest.ExitCode.OK and self.above(session.config):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if not self.made or not is_whole(config):
            return
        limits = self.limits(config)
        terminalreporter.section(
            "large programs that tests made, by folder" + (", and the most allowed" if limits else "")
        )
        for folder, programs in sorted(self.made.items()):
            terminalreporter.write_line(f"{len(programs):5} {limits.get(folder, ''):5} {folder}")
        for folder in self.above(config):
            text = _TOO_MANY.format(folder=folder, made=len(self.made[folder]), limit=limits[folder])
            terminalreporter.write_line(text, red=True)


def pytest_configure(config: pytest.Config) -> None:
    programs = Programs()
    config.pluginmanager.register(programs)
    compiler.OBSERVERS.append(programs.observe)
    if is_whole(config) and config.option.durations is None:
        config.option.durations, config.option.durations_min = SLOWEST
