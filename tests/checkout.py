"""Makes the suite, and every process that it starts, test this checkout and not an installed package.

This plugin is loaded before anything imports the package. It puts the checkout's src first on the path of this process
and, through the environment, of every other process. A test that starts a process with other environment variables must
build them from `os.environ`; otherwise it fails here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
_VARIABLE = "PYTHONPATH"


def _use() -> None:
    others = [entry for entry in os.environ.get(_VARIABLE, "").split(os.pathsep) if entry not in ("", str(SRC))]
    os.environ[_VARIABLE] = os.pathsep.join([str(SRC), *others])
    sys.path.insert(0, str(SRC))
    subprocess.Popen = _Popen  # type: ignore[misc]  # run, call and check_output start their processes with it, too


class _Popen(subprocess.Popen):
    """Refuses to start a Python process that could import another copy of the package."""

    def __init__(self, args, *rest, **options):
        environment = options.get("env")
        words = [args] if isinstance(args, str) else [str(word) for word in args]
        shell = Path(words[0]).name in ("bash", "env", "sh") or isinstance(args, str)
        if not any("python" in word for word in (words if shell else [Path(words[0]).name])):
            # Such as ldconfig, which torch starts.
            super().__init__(args, *rest, **options)
            return
        entries = (os.environ if environment is None else environment).get(_VARIABLE, "").split(os.pathsep)
        assert entries[0] == str(SRC), f"start it with os.environ | {{...}}, so that it imports this checkout: {words}"
        assert not {"-I", "-E"} & set(words[1:2]), f"-I and -E leave {_VARIABLE} out: {words}"
        super().__init__(args, *rest, **options)


_use()


def pytest_configure(config: pytest.Config) -> None:
    import trainer

    if not Path(trainer.__file__).resolve().is_relative_to(SRC):
        raise pytest.UsageError(f"these are tests of {SRC}, but the package was imported from {trainer.__file__}")
