"""Runs the commands of a guide like a reader: its fenced bash blocks, in order, from the root of the checkout.

    python scripts/run_guide.py docs/guides/migrating.md

A block must end with exit code 0, or with the code in a comment directly before it: `<!-- exit code: 1 -->`. The runs
of the guide start from nothing, so no runs from earlier must exist.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"(?:^<!-- exit code: (?P<code>\d+) -->\n)?^```bash\n(?P<commands>.*?)^```$", re.MULTILINE | re.DOTALL
)


def main(guide: str) -> None:
    blocks = list(BLOCK.finditer(Path(guide).read_text(encoding="utf-8")))
    if not blocks:
        raise SystemExit(f"{guide} holds no commands")
    commands = "".join(block["commands"] for block in blocks)
    runs = [f"runs/{name}" for name in dict.fromkeys(re.findall(r"\brun_name[=:] *([\w.-]+)", commands))]
    if there := [run for run in runs if (ROOT / run).exists()]:
        raise SystemExit(
            f"{guide} begins runs that are there already: {', '.join(there)}; move them away or delete them"
        )
    # `python` is the interpreter that runs this script.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for number, block in enumerate(blocks, 1):
        print(f"---- {guide}, {number} of {len(blocks)}\n{block['commands'].rstrip()}", flush=True)
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block["commands"]], cwd=ROOT, env=environment)
        expected = int(block["code"] or 0)
        if done.returncode != expected:
            raise SystemExit(f"{guide}: block {number} ended with {done.returncode}, expected {expected}")


if __name__ == "__main__":
    main(*sys.argv[1:])
