"""How many large programs the tests of each folder make, and the most that they may make.

A program counts where JAX lowers and compiles it, also if it then reads it from the compilation cache: that takes half
the time of compiling, and tracing and lowering take longer than compiling (972 and 806 s in a run of the usual tests).
So the numbers do not depend on what an earlier run or the other worker left in the cache. Programs with the same text
count once in a folder, whichever worker makes them. Small ones do not count: most are single operations outside of
`jit`, which the folders that come first in a process make for the others. They took a quarter of the time of compiling
in unit/optim/test_groups.py.

Each run of the whole suite prints the numbers. One of the usual tests with at most two workers, as README's command has
it, fails if a folder is above its limit.
"""

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import compiler
import pytest
from whole import is_whole

# 10 % or 10 above the numbers of 2026-11-29, each of a run of the folder alone; of unit/inference, unit/layers,
# unit/products and unit/training a third above those of README's command. There a folder makes fewer: a program that
# the test of another folder made in the same process is there. How many depends on the order of the tests.
LIMITS = {
    "integration": 500,
    "unit/aot": 20,
    "unit/calibration": 24,
    "unit/checkpoint": 16,
    "unit/compare": 37,
    "unit/docs": 35,
    "unit/evaluation": 22,
    "unit/inference": 370,
    "unit/layers": 205,
    "unit/linen": 48,
    "unit/models": 240,
    "unit/objectives": 112,
    "unit/ops": 225,  # with the gated delta rule, 204
    "unit/optim": 88,
    "unit/products": 360,
    "unit/serving": 28,
    "unit/sharding": 46,
    "unit/state": 78,
    "unit/training": 235,
    "unit/weights": 130,
}
OTHERS = 10  # of any other folder
SMALL = 1000  # bytes of MLIR; an operation of jax.numpy has 300 to 800
SLOWEST = 30, 2.0  # how many tests such a run names, of those that take that many seconds
_TOO_MANY = (
    "{folder} has made {made} large programs and may make {limit}: give tests equal configurations and shapes, so "
    "that they share programs, or raise the limit in tests/programs.py with a reason"
)


class Programs:
    """The plugin: digests of large programs by folder of tests, of all workers."""

    def __init__(self) -> None:
        self.made: defaultdict[str, set[str]] = defaultdict(set)
        self.folder = "collection"
        self.workers = 0

    def observe(self, module: Any) -> None:
        text = io.BytesIO()
        module.operation.write_bytecode(text)  # takes less than a hundredth of the time of compiling
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
        """Returns the limit of each folder, or nothing if this run is not one that they are for."""
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
