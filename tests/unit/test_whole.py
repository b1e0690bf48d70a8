"""Which tests a run of the suite skips (tests/whole.py), and how many programs it may compile (tests/programs.py)."""

import re
from pathlib import Path
from types import SimpleNamespace

import compiler
import jax
import programs
import pytest
import whole

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parents[1]
FILE = """
import pytest

def test_plain():
    pass

@pytest.mark.rest(covered_by="test_plain")
def test_covered():
    pass

@pytest.mark.rest(covered_by="the others", cases=("x", "y-2"))
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", ["x", "y", "x, y", pytest.param("z", marks=pytest.mark.rest(covered_by="y"))])
def test_cases(name, number):
    pass

@pytest.mark.parametrize("combination", ["first", "between", "last"])
def test_combinations(combination):
    pass

@pytest.mark.parametrize("case", [{"combination": "between"}], ids=["a"])
def test_in_dict(case):
    pass
"""
USUAL = "plain cases[y-1] cases[x,y-1] cases[x,y-2] combinations[first] combinations[last]"
REST = "covered cases[x-1] cases[x-2] cases[y-2] cases[z-1] cases[z-2] combinations[between] in_dict[a]"

MAKE = """
import jax

def test_a():
    for _ in range(2):
        jax.jit(lambda x: sum(x + number for number in range(50))).lower(1.0).compile()
    jax.jit(lambda x: x + 1).lower(1.0).compile()
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs the tests of a file with whole.py, and returns pytest's exit code, the tests that ran, and the output."""
    monkeypatch.setattr(whole, "BETWEEN", ("between",))
    pytester.makeini("[pytest]\ntestpaths = .\naddopts = -p no:cacheprovider --strict-markers")

    def run(text, *options):
        pytester.makepyfile(test_it=text)
        done = pytester.runpytest_inprocess("-v", *options, plugins=[whole])
        names = re.findall(r"^test_it\.py::test_(.*) PASSED", done.stdout.str(), re.MULTILINE)
        return done.ret, {name.replace(", ", ",") for name in names}, done.stdout.str()

    return run


def test_the_marked_tests_and_cases_are_left_out(run):
    usual, rest = set(USUAL.split()), set(REST.split())
    code, names, said = run(FILE)
    assert (code, names) == (0, usual)
    assert f"left out: {len(rest)} tests that others nearly cover" in said
    for named in ([], ["test_it.py"]):
        assert run(FILE, "--tests=rest", *named)[:2] == (0, rest)
        assert run(FILE, "--tests=usual", *named)[:2] == (0, usual)
    for options in (["--tests=all"], ["test_it.py"]):
        code, names, said = run(FILE, *options)
        assert (code, names) == (0, usual | rest)
        assert "left out" not in said


def test_a_share_has_every_nth_file_of_those_that_a_run_has(run, pytester):
    usual, rest = set(USUAL.split()), set(REST.split())
    pytester.makepyfile(test_first="def test_plain(): pass")
    assert run(FILE, "--tests=rest", "--share=1/2")[:2] == (0, rest)  # no test of test_first.py is in the rest
    assert run(FILE, "--share=2/2")[:2] == (0, usual)
    assert run(FILE, "--share=1/2")[:2] == (0, set())  # only test_first.py
    assert run(FILE, "--tests=rest", "--share=2/2")[0] == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run(FILE, "--share=1/2")[2].count("left out: 14 others") == 1
    assert run(FILE, "--share=3/2")[0] == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("", "takes covered_by"),
        ("'test_b'", "takes covered_by"),
        ("covered_by=''", "takes covered_by"),
        ("covered_by='test_b', case=('1',)", "takes covered_by"),
        ("covered_by='test_b', cases=('1', '3')", "has '3', and no case of the test has this value"),
    ],
)
def test_a_mark_that_says_nothing_or_matches_nothing_is_an_error(run, mark, message):
    text = f"import pytest\n@pytest.mark.rest({mark})\n@pytest.mark.parametrize('n', [1, 2])\ndef test_a(n): pass\n"
    for options in ([], ["test_it.py::test_a[1]"]):
        code, _, said = run(text, *options)
        assert code == (pytest.ExitCode.USAGE_ERROR if options else pytest.ExitCode.INTERRUPTED)
        assert f"test_it.py::test_a: the mark rest {message}" in said


def test_cases_may_be_gone_with_their_combinations(run, monkeypatch):
    text = "import pytest\n@pytest.mark.rest(covered_by='b', cases=({}))\ndef test_a(): pass\n"
    assert run(text.format("'gone',"))[0] == pytest.ExitCode.INTERRUPTED
    monkeypatch.setattr(whole, "BETWEEN", ())
    for cases in ("'gone',", ""):
        assert run(text.format(cases))[:2] == (0, {"a"})


def test_the_files_that_cover_exist():
    marks = [mark for path in TESTS.rglob("test_*.py") for mark in re.findall(r'covered_by="(.*?)"', path.read_text())]
    names = {name for mark in marks for name in re.findall(r"\b(?:unit|integration)/[\w/]*(?:\.py)?", mark)}
    assert len(names) > 30
    assert [name for name in names if not (TESTS / name).exists()] == []


@pytest.fixture
def counted(pytester, monkeypatch):
    """Runs a test in each of two folders, beside workers that have compiled other programs.

    Each test compiles programs. Returns pytest's exit code and output.
    """
    monkeypatch.setattr(compiler, "OBSERVERS", [])  # disables the plugin of this pytest run
    monkeypatch.setattr(programs, "LIMITS", {"few": 3})
    monkeypatch.setattr(programs, "OTHERS", 0)
    pytester.makeini("[pytest]\ntestpaths = .\naddopts = -p no:cacheprovider -q")
    for folder in ("few", "many"):
        pytester.mkdir(folder).joinpath(f"test_{folder}.py").write_text(MAKE)

    def run(*options, workers=()):
        class Workers:
            def pytest_sessionstart(self, session):
                for made in workers:
                    node = SimpleNamespace(config=session.config, workeroutput={"programs": made})
                    session.config.hook.pytest_testnodedown(node=node, error=None)

        done = pytester.runpytest_inprocess(*options, plugins=[whole, programs, Workers()])
        return done.ret, done.stdout.str()

    return run


def test_a_folder_that_makes_too_many_programs_fails_a_usual_run(counted, monkeypatch):
    code, said = counted()
    assert code == pytest.ExitCode.TESTS_FAILED
    assert re.search(r"^ +1 +3 few\n +1 +0 many\nmany has made 1 large programs and may make 0", said, re.MULTILINE)
    monkeypatch.setitem(programs.LIMITS, "many", 1)
    assert counted()[0] == counted(workers=[{"few": ["a", "b"]}, {"few": ["b", "a"], "many": []}])[0] == 0
    code, said = counted(workers=[{"few": ["a", "b"]}, {"few": ["b", "c"]}])
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "few has made 4 large programs and may make 3: give tests equal configurations" in said


def test_other_runs_have_no_limits(counted):
    for options, workers in (["--tests=all"], []), ([], [{"few": ["a", "b", "c"]}] * 3):
        code, said = counted(*options, workers=workers)
        assert (code, "large programs that tests made, by folder ==" in said) == (0, True)
    for options in ["few", "many"], ["-k", "test_a"]:
        code, said = counted(*options)
        assert (code, "programs that" in said) == (0, False)


def test_a_worker_reports_what_it_made():
    """Equal programs count once, in whichever folder they are compiled."""
    plugin, worker = programs.Programs(), SimpleNamespace(workeroutput={})
    for folder, numbers in {"unit/a": [1, 2, 1], "integration": [1]}.items():
        plugin.folder = folder
        for number in numbers:
            plugin.observe(jax.jit(lambda x, n=number: sum([x + n] * 300)).lower(1.0).compiler_ir())
            plugin.observe(jax.jit(lambda x, n=number: x + n).lower(1.0).compiler_ir())  # too small to count
    plugin.pytest_sessionfinish(SimpleNamespace(config=worker))
    made = worker.workeroutput["programs"]
    assert {folder: len(digests) for folder, digests in made.items()} == {"unit/a": 2, "integration": 1}
    assert set(made["integration"]) < set(made["unit/a"])
