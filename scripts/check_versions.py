"""Tests the project with the newest dependencies by a few commands or by the whole test suite.

    python scripts/check_versions.py [--python PATH] [--environment FOLDER] [--suite] [--measure]

With Python 3.11, pip installs the oldest JAX that pyproject.toml accepts; with a later Python, the newest. The script
creates a virtual environment from `--python` (default: the oldest installed Python from 3.12 on). There it compares the
five combinations of the NNX flags, trains with a checkpoint, resumes, generates, compiles for a TPU ahead of time, and
runs the tests of `batch_invariant` whose bits a new XLA is most likely to change. `--environment` names the
environment's folder, which is kept, and reused if it exists. `--suite` runs every test instead; `--measure` prints one
row of the table in docs/benchmarks/versions.md. If there is no Python 3.12 or later, the script prints a message and
exits with 0.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TINY = (
    *("base_emb_dim=64", "base_mlp_dim=128", "base_num_decoder_layers=2", "base_num_query_heads=2"),
    *("base_num_kv_heads=2", "head_dim=32", "vocab_size=512", "max_target_length=64", "per_device_batch_size=2"),
)
RUN = ("run_name=versions", "tokenizer_type=bytes", "checkpoint_period=4", "eval_interval=-1", "prompt=")
TPU = ("compile_topology=v5e-4", "ici_fsdp_parallelism=4", "attention=flash", "head_dim=128", "max_target_length=256")
# The commands in order, each with a text that its output must contain.
PART = (
    (("parity", "base.yml", *TINY, "dataset_type=synthetic", "left=nnx", "right=all"), "are equal in every bit"),
    (("train", "base.yml", *TINY, *RUN, "steps=4"), "completed step: 3"),
    (("train", "base.yml", *TINY, *RUN, "steps=8"), "4 of 8 updates are done"),
    (("generate", "runs/versions", "prompt=def", "max_target_length=64"), "def"),
    (("train_compile", "base.yml", *TINY, *TPU), "as the compiler scheduled it"),
)
# Tests with narrow products and sums over few experts. XLA has compiled these operations to different code in different
# programs (docs/decisions/0028).
BITS = ("tests/unit/inference/test_batch_invariant.py", "-k", "test_log and float32 and (lora or mixtral or qwen3_moe)")
# Prints the compiler's figures for the table of versions.
MEASURE = """
import hashlib, jax, json
from trainer.config.load import load
from trainer.training.build import build
run = build(load(["base.yml", "dataset_type=synthetic", "steps=20"]).config, jax.devices()[:1])
lowered = run.step.lower(*run.abstract_args())
memory = lowered.compile().memory_analysis()
print(json.dumps({
    "jax": jax.__version__, "text": hashlib.sha256(lowered.as_text().encode()).hexdigest()[:12],
    "lines": lowered.as_text().count("\\n"), "temporaries": memory.temp_size_in_bytes,
    "arguments": memory.argument_size_in_bytes, "code": memory.generated_code_size_in_bytes}))
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", type=Path)
    parser.add_argument("--environment", type=Path)
    parser.add_argument("--suite", action="store_true")
    parser.add_argument("--measure", action="store_true")
    given = parser.parse_args(argv)
    source = given.python or first_python()
    if source is None:
        print("not checked with the newest dependencies: no Python of 3.12 or later was found (--python PATH)")
        return
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        python = environment(source, given.environment or Path(scratch) / "environment")
        print(f"{source}: environment in {time.monotonic() - began:.0f} s", flush=True)
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
        clean |= {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": f"{scratch}/cache"}
        if given.suite:
            suite = [python, "-m", "pytest", "-n", "2", "--tests=all"]
            raise SystemExit(subprocess.call(suite, cwd=ROOT, env=clean))
        if given.measure:
            measure(python, Path(scratch), clean)
            return
        for command, expected in PART:
            output = run(python, ("-m", f"trainer.{command[0]}", *command[1:]), Path(scratch), clean)
            if expected not in output:
                raise SystemExit(f"{' '.join(command)}: no {expected!r} in its output:\n{output}")
        run(python, ("-m", "pytest", "-q", "-n", "0", *BITS), ROOT, clean, "bits of generation and training")
    print(f"checked with the newest dependencies in {time.monotonic() - began:.0f} s")


def first_python() -> Path | None:
    """Returns the oldest working Python from 3.12 on that is in PATH or that pyenv has installed; None if there is
    none. The oldest is chosen because wheels may be missing for newer versions."""
    pyenv = (Path.home() / ".pyenv" / "versions").glob("3.*/bin/python")
    found = [(int(path.parts[-3].split(".")[1]), path) for path in pyenv]
    on_path = {minor: shutil.which(f"python3.{minor}") for minor in range(12, 20)}
    found += [(minor, Path(path)) for minor, path in on_path.items() if path]
    for minor, path in sorted(found):
        # PATH may contain a pyenv shim that does not work.
        if minor >= 12 and not subprocess.run([path, "-c", "import venv, ssl"], capture_output=True).returncode:
            return path
    return None


def environment(python: Path, folder: Path) -> str:
    """Creates an environment with the newest dependencies unless it exists. Returns the environment's Python."""
    inside = str(folder / "bin" / "python")
    if not Path(inside).exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([inside, "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[test]"], check=True)
    return inside


def run(python: str, words: Sequence[str], cwd: Path, env: dict[str, str], name: str = "") -> str:
    """Runs a command and returns its output. A command that fails ends the script."""
    began = time.monotonic()
    command = [python, *words]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(f"{time.monotonic() - began:5.0f} s  {name or ' '.join(words[1:3])}", flush=True)
    return done.stdout


def measure(python: str, scratch: Path, env: dict[str, str]) -> None:
    """Prints the figures for a row of the table of versions."""
    print(run(python, ("-c", MEASURE), scratch, env, "compile").splitlines()[-1])
    words = ("base.yml", "dataset_type=synthetic", "steps=20", "eval_interval=-1", "prompt=")
    run(python, ("-m", "trainer.train", *words), scratch, env)
    rows = (scratch / "runs" / "run-0001" / "metrics.jsonl").read_text().splitlines()
    print("loss of the last step:", [row["loss"] for row in map(json.loads, rows) if "loss" in row][-1])


if __name__ == "__main__":
    main()
