"""The README's commands work without changes."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from compiler import xla_flags

README = (Path(__file__).parents[2] / "README.md").read_text()


def commands():
    """The lines in fenced blocks that run the trainer. Blocks of output are marked text, long commands bash."""
    fence = None
    for line in README.splitlines():
        if line.startswith("```"):
            fence = line if fence is None else None
        elif fence == "```" and re.match(r"([A-Z_]+=\S+ )?python -m trainer", line) and "[" not in line:
            yield line


COMMANDS = list(commands())


def test_there_are_commands():
    assert len(COMMANDS) >= 4


@pytest.mark.default_combination
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_runs(command, tmp_path):
    """Runs with one step on synthetic rows. The last value of a key wins, so the command's own values are checked,
    too."""
    environment, _, words = command.partition("python -m ")
    module, *args = shlex.split(words)
    variables = dict(word.split("=", 1) for word in shlex.split(environment))
    # Compiled quickly. CI runs the README's first command unchanged. If a flag is given twice, the last one counts.
    variables["XLA_FLAGS"] = f"{xla_flags(1)} {variables.get('XLA_FLAGS', '')}"
    if "--help" not in args:
        args += ["dataset_type=synthetic", "steps=1", "eval_interval=-1", f"base_output_directory={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
