"""What a run of the whole suite leaves out, and which marks are refused; see tests/whole.py."""

import re
from pathlib import Path

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


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs the tests of a file with whole.py, and returns pytest's exit code, what it ran, and what it said."""
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
    assert run(FILE, "--tests=rest")[:2] == (0, rest)
    for options in (["--tests=all"], ["test_it.py"], ["--tests=rest", "test_it.py"]):
        code, names, said = run(FILE, *options)
        assert (code, names) == (0, usual | rest)
        assert "left out" not in said


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
