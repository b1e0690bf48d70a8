"""Removes Linen, and then the flags that select it, in a temporary copy of the checkout, and runs the affected tests.

    python scripts/rehearse_removal.py [pytest's options]

The three flags are enable_nnx, pure_nnx_decoder and pure_nnx. Each allowed combination of their values has a name; all
but one, "nnx", use Linen.

One commit will delete Linen: the folder src/trainer/linen, its tests in tests/unit/linen, its combinations in the table
of the flags (config/flags.py, base.yml) and in the registry of models, the README's command with a Linen flag, and the
import-linter contract that nothing imports it. After that commit, a flag that selects Linen causes an error that
explains the removal. The next commit will delete the flags from base.yml and config/flags.py, the README's section
about them, and tests/pins.py, which guards their defaults. After that commit, the table of MaxText's keys accepts the
flags, but only with the value true.

The script searches all tests outside TOUCHED below for the deleted names. It lets pytest collect the whole suite, which
fails if anything imports deleted code. Then it runs the tests in TOUCHED, except those that other tests nearly cover
(tests/whole.py); if the options name tests, it runs those instead. It exits with pytest's exit code.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
REGISTRY, TABLE = Path("src/trainer/backends/registry.py"), Path("src/trainer/config/flags.py")
# The table of MaxText's keys. With the entry below, command lines and configurations that still set the flags to true
# continue to work.
TOLERATED = Path("src/trainer/config/maxtext/keys.yml")
LEFT_OF_THE_FLAGS = """\
- verdict: never
  why: "leave the flags out, the model is always NNX"
  keys:
    enable_nnx: [true]
    pure_nnx_decoder: [true]
    pure_nnx: [true]
"""
# Tests that use the flags, the registry, the combinations or a command line.
TOUCHED = (
    *("tests/unit/backends", "tests/unit/compare", "tests/unit/config", "tests/unit/docs", "tests/unit/state"),
    *("tests/unit/models/test_blocks.py", "tests/unit/models/test_family.py", "tests/unit/aot/test_executable.py"),
    "tests/unit/training/test_build.py",
    *("tests/unit/observe/test_banner.py", "tests/unit/test_source.py"),
    *("tests/integration/test_five_combinations.py", "tests/integration/test_native_train_states.py"),
    "tests/integration/test_train.py",
    "tests/integration/test_train_compile.py",
    *(
        f"tests/integration/test_parity.py::{name}"
        for name in (
            "test_a_planted_difference_is_found_in_its_layer",
            "test_mistakes_end_with_code_2",
            "test_keys_that_mean_nothing_to_it_are_named",
            "test_help_needs_no_jax",
        )
    ),
)


def copy_checkout(folder: Path) -> None:
    """Copies all files that git tracks or would add, in their current state."""
    if shutil.which("git") is None:
        raise SystemExit("git is missing; it is needed to list the files to copy")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        raise SystemExit(f"{ROOT}: git cannot list the files to copy: {listed.stderr.strip()}")
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, folder / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def edit(path: Path, pattern: str, count: int, *, replacement: str = "") -> None:
    """Deletes or replaces the matches of `pattern` in `path`. Fails if there are not exactly `count` matches."""
    text, found = re.subn(pattern, replacement, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if found != count:
        raise SystemExit(f"{path}: {found} matches of {pattern!r}, expected {count}")
    path.write_text(text, encoding="utf-8")


def remove_linen(folder: Path) -> list[str]:
    """Deletes Linen from the checkout in `folder`. Returns the names of the deleted combinations of the flags."""
    shutil.rmtree(folder / "src/trainer/linen")
    shutil.rmtree(folder / "tests/unit/linen")
    gone = re.findall(r'^    "(\w+)": "trainer\.linen\.', (folder / REGISTRY).read_text(encoding="utf-8"), re.MULTILINE)
    names = "|".join(gone)
    edit(folder / REGISTRY, rf'^    "({names})": .*\n', len(gone))
    edit(folder / TABLE, rf'^    "({names})": .*\n', len(gone))
    edit(folder / "base.yml", r"^#   (?=.*\bfalse\b)(true|false) +(true|false) +(true|false) .*\n", len(gone))
    edit(folder / "README.md", r"^python -m trainer\.train .*\b(enable_nnx|pure_nnx|pure_nnx_decoder)=false\b.*\n", 1)
    contract = r"\[\[tool\.importlinter\.contracts\]\]\nname = .Nothing imports the Linen package"
    edit(folder / "pyproject.toml", rf"^{contract}(.*\n)+?forbidden_modules .*\n", 1)
    return gone


def remove_flags(folder: Path) -> None:
    """Deletes the three flags from the checkout in `folder`, from which `remove_linen` has deleted Linen."""
    (folder / "tests/pins.py").unlink()
    (folder / "tests/unit/test_pins.py").unlink()
    (folder / "tests/unit/config/test_flags.py").unlink()
    for path in (folder / "tests").rglob("test_*.py"):
        mark = r"^(@|pytestmark = )pytest\.mark\.default_combination.*\n"
        edit(path, mark, len(re.findall(mark, path.read_text(encoding="utf-8"), re.MULTILINE)))
    edit(folder / "tests/conftest.py", r'(?<=^pytest_plugins = \["checkout"), "pins"(?=, )', 1)
    edit(folder / "base.yml", r"^# ---- Module system -+\n(?:.*\n)+?(?=^# ---- )", 1)
    edit(folder / "src/trainer/config/keys.pyi", r"^    (enable_nnx|pure_nnx_decoder|pure_nnx): .*\n", 3)
    edit(folder / TABLE, r"(?<=^FLAGS = \().*(?=\)$)", 1)
    edit(folder / TABLE, r'(?<=^    "nnx": \().*(?=\),$)', 1)
    edit(folder / TABLE, r"(?<=^FLAGS) (?== \(\))", 1, replacement=": tuple[str, ...] ")
    edit(folder / TOLERATED, "^groups:\n", 1, replacement=f"groups:\n{LEFT_OF_THE_FLAGS}")
    edit(folder / "README.md", r"^## Flip a flag, change nothing\n(?:.*\n)+?(?=^## )", 1)


def check_names(folder: Path, gone: Sequence[str]) -> None:
    """Raises SystemExit if a test outside TOUCHED names a deleted combination, because only TOUCHED is run."""
    named = re.compile(rf'"({"|".join(gone)})"')
    touched = tuple(name.partition("::")[0] for name in TOUCHED)
    names = {str(path.relative_to(folder)): path for path in sorted((folder / "tests").rglob("*.py"))}
    for name, path in names.items():
        if not name.startswith(touched) and (found := named.search(path.read_text(encoding="utf-8"))):
            raise SystemExit(f"{name} hard-codes {found[0]}: use support.ALL_COMBINATIONS, or add the file to TOUCHED")


def check_message(folder: Path, environment: dict[str, str], message: str) -> None:
    """Checks that Linen flags cause a configuration error that contains `message`."""
    command = [sys.executable, "-m", "trainer.train", "base.yml"]
    flags = ["enable_nnx=false", "pure_nnx_decoder=false", "pure_nnx=false"]
    done = subprocess.run([*command, *flags], cwd=folder, env=environment, capture_output=True, text=True)
    print(done.stderr, end="")
    if done.returncode != 2 or message not in done.stderr:
        raise SystemExit(f"Linen flags did not cause a configuration error with {message!r}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="without-linen-") as name:
        folder = Path(name)
        copy_checkout(folder)
        environment = os.environ | {"PYTHONPATH": str(folder / "src")}
        gone = remove_linen(folder)
        print(f"removed Linen with its {len(gone)} combinations in a copy", flush=True)
        check_names(folder, gone)
        check_message(folder, environment, "the Linen paths were removed")
        remove_flags(folder)
        print("removed the three flags", flush=True)
        check_message(folder, environment, "the model is always NNX")
        pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
        collect = [*pytest[:3], "--collect-only", "-qqq"]
        collected = subprocess.run(collect, cwd=folder, env=environment, capture_output=True, text=True)
        if collected.returncode:
            raise SystemExit(f"something imports deleted code:\n{collected.stdout}")
        names_tests = any(word.startswith("tests") for word in sys.argv[1:])
        tests = () if names_tests else ("--tests=usual", *TOUCHED)
        suite = subprocess.run([*pytest, *tests], cwd=folder, env=environment)
        raise SystemExit(suite.returncode)


if __name__ == "__main__":
    main()
