"""Selects the tests of a run of the whole suite, which leaves out tests that others nearly cover.

`python -m pytest -n 2` leaves these tests out and prints their number, `--tests=rest` runs only them, and
`--tests=all` runs all tests. If the command line names tests, nothing is left out unless it has `--tests=usual`, too.
`--share=2/3` runs the second of every three test files. CI runs a sixth of the tests left out at each commit, in turn.

Left out are
- cases of the three combinations between the first and the last one. In all five combinations the update has the same
  text (test_five_combinations.py), the initial parameters are equal, and the codec only permutes leaves
  (test_codec.py), so two combinations represent all of them end to end;
- tests with the mark `rest(covered_by="unit/state/test_host.py; fp8")`. `covered_by` names what still runs: files in
  tests/, or other tests and cases of the same file. `cases=("bfloat16", "int8-8")` leaves out only some cases of a
  parametrized test: those whose name contains bfloat16, or int8 and 8 joined by a hyphen.
"""

import argparse
from collections.abc import Iterator

import pytest
from support import ALL_COMBINATIONS

BETWEEN = ALL_COMBINATIONS[1:-1]


def is_left_out(item: pytest.Item) -> bool:
    """Returns whether a run of the whole suite leaves the test out."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = {value if isinstance(value, str) else value.get("combination") for value in values if _names(value)}
    marks = [mark.kwargs.get("cases") for mark in item.iter_markers("rest")]
    return not names.isdisjoint(BETWEEN) or any(cases is None or _has(item, cases) for cases in marks)


def _names(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("combination"), str))


def _has(item: pytest.Item, cases: tuple[str, ...]) -> bool:
    values = item.name.partition("[")[2].removesuffix("]")
    return any(f"-{case}-" in f"-{values}-" for case in cases)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Iterator[None]:
    """Fails on a mark `rest` without `covered_by`, or with a case that the test does not have."""
    made = yield
    tests = made if isinstance(made, list) else []
    for test in tests:
        for mark in test.iter_markers("rest"):
            name = f"{test.nodeid.partition('[')[0]}: the mark rest"
            if mark.args or not mark.kwargs.get("covered_by") or not mark.kwargs.keys() <= {"covered_by", "cases"}:
                raise pytest.Collector.CollectError(f"{name} takes covered_by, what still runs, and cases: {mark}")
            for case in mark.kwargs.get("cases", ()):
                # With a single combination, the cases named for other combinations do not exist.
                if BETWEEN and not any(_has(other, (case,)) for other in tests):
                    raise pytest.Collector.CollectError(f"{name} has {case!r}, and no case of the test has this value")
    return made


def is_whole(config: pytest.Config) -> bool:
    """Returns whether the command line selects no tests by path, name, mark or earlier failure."""
    chosen = any(getattr(config.option, name, None) for name in ("keyword", "markexpr", "lf"))
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tests", choices=("usual", "rest", "all"), help="see tests/whole.py")
    parser.addoption("--share", type=_share, metavar="K/N", help="see tests/whole.py")


def _share(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text}: not K/N with K from 1 to N")
    return int(number), int(of)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rest(covered_by, cases): a run of the whole suite leaves it out")
    if config.option.tests is None:
        config.option.tests = "usual" if config.args_source is pytest.Config.ArgsSource.TESTPATHS else "all"
    config.option.tests = getattr(config, "workerinput", {}).get("tests", config.option.tests)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """Hook of xdist: workers leave out the same tests as the main process."""
    node.workerinput["tests"] = node.config.option.tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = set()
    if config.option.tests != "all":
        left |= {item for item in items if is_left_out(item) is (config.option.tests == "usual")}
    if config.option.share:
        number, of = config.option.share
        files = set(sorted({item.path for item in items if item not in left})[number - 1 :: of])
        left |= {item for item in items if item.path not in files}
    if not left:
        return
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=list(left))
    config.stash[_LEFT] = len(left)


_LEFT = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash.get(_LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Hook of xdist: takes the number from any worker, because all leave out the same tests."""
    node.config.stash[_LEFT] = getattr(node, "workeroutput", {}).get("left", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_LEFT, 0):
        others = config.option.tests == "rest" or config.option.share
        kind = "others" if others else "tests that others nearly cover; --tests=rest runs them"
        terminalreporter.write_line(f"left out: {left} {kind}")
