"""Compares the results of this commit with those of its base, the commit that it builds on, on this machine.

    python scripts/compare_with_base.py [--base COMMIT] [--write]

For each of a few small configurations that cover the code paths of the training step, `trainer.parity record=FILE` runs
in a worktree of the base, and `trainer.parity left=FILE` runs in this checkout. Programs are compiled with the fast
options of tests/compiler.py. Changed bits are reported, and are an error unless docs/changed-bits.md has a new line
that names the configuration. The base is `--base`; by default, it is the commit where this branch left origin/main, or
else the first parent of HEAD.

tests/goldens/programs.json contains, for each configuration, the results that do not depend on the machine: names and
shapes of the state, FLOPs, and bytes. A difference from this file is an error; with `--write`, the script rewrites the
file instead. FLOPs and bytes are compared only with the version of JAX that the file names.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from compiler import QUICKLY_EXACT

ROOT = Path(__file__).parents[1]
FACTS = ROOT / "tests" / "goldens" / "programs.json"
CHANGES = "docs/changed-bits.md"
TINY = (
    *("dataset_type=synthetic", "base_emb_dim=32", "base_mlp_dim=64", "base_num_query_heads=4", "base_num_kv_heads=2"),
    *("head_dim=8", "base_num_decoder_layers=2", "vocab_size=128", "max_target_length=32", "per_device_batch_size=4"),
)
LATENT = (
    *("decoder_block=deepseek", "attention_type=mla", "kv_lora_rank=8", "qk_nope_head_dim=8", "qk_rope_head_dim=4"),
    *("v_head_dim=8", "num_experts=4", "num_experts_per_tok=2", "base_num_kv_heads=4", "base_moe_mlp_dim=16"),
    *("shared_experts=1", "first_num_dense_layers=1", "routed_score_func=sigmoid", "routed_bias=true"),
)
MESH = ("ici_data_parallelism=2", "ici_fsdp_parallelism=2", "per_device_batch_size=2")
ONE = ("ici_fsdp_parallelism=1",)
CASES = {
    "dense": (*TINY, *ONE, "left=nnx", "z_loss_multiplier=0.001", "skip_step_on_spikes=true"),
    "linen": (*TINY, *ONE, "left=linen", "attention=blockwise", "gradient_accumulation_steps=2", "num_vocab_tiling=2"),
    "unrolled": (*TINY, *ONE, "left=nnx", "scan_layers=false", "dropout_rate=0.1", "enable_dropout=true"),
    "experts": (*TINY, *ONE, "left=nnx", *LATENT, "mtp_num_layers=1", "opt_type=muon"),
    "meshes": (*TINY, *MESH, "left=nnx", "shard_optimizer_over_data=true", "remat_policy=full", "dtype=bfloat16"),
}
# The code of a process that runs the commands from stdin, and prints the exit code and the last line of each command.
RUN = """
import contextlib, io, json, sys
from trainer import parity
for words in json.load(sys.stdin):
    code, out, error = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            parity.main(words)
        except SystemExit as ended:
            code = ended.code
    said = out if code in (0, 1) else error
    print(json.dumps([code, said.getvalue().strip().rpartition("\\n")[2]]), flush=True)
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(argv)
    base, began = given.base or base_of_head(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, worktree(base, Path(folder) / "base") as tree:
        scratch = Path(folder)
        halves = [list(CASES)[::2], list(CASES)[1::2]]
        with concurrent.futures.ThreadPoolExecutor(len(halves)) as pool:
            done = list(pool.map(lambda names: compare(tree, names, scratch), halves))
        said = {name: text for part in done for name, text in part.items()}
        found = {name: facts_of(scratch / f"{name}.head.safetensors") for name in CASES}
    failed = [] if base is None else judged(said, changes_since(base))
    print(f"base {base}: {time.monotonic() - began:.0f} s")
    failed += facts_differ(found, write=given.write)
    if failed:
        raise SystemExit("\n".join(failed))


def compare(tree: Path | None, names: Sequence[str], scratch: Path) -> dict[str, tuple[int, str]]:
    """Records the results of the cases `names` with the base in `tree`. Then, in this checkout, compares the results
    with the base's records, and records this checkout's results, too. Returns a dict from the name of a case to the
    exit code and the last line of its comparison. The code is -1 if the base cannot record the case."""
    paths = {name: scratch / f"{name}.safetensors" for name in names}
    here = [("base.yml", *CASES[name], f"record={scratch / name}.head.safetensors") for name in names]
    said: dict[str, tuple[int, str]] = {}
    compared: list[str] = []
    if tree:
        words = {name: ("base.yml", *CASES[name], f"record={path}", "arrays=true") for name, path in paths.items()}
        recorded = run(tree, list(words.values()), scratch)
        for name, (code, text) in zip(names, recorded, strict=True):
            if code:
                said[name] = -1, f"the base cannot record it: {text}"
        compared = [name for name in names if name not in said]
    done = run(ROOT, [*((f"left={paths[name]}",) for name in compared), *here], scratch)
    for name, (code, text) in zip(compared, done, strict=False):
        said[name] = code, text.replace(paths[name].name, "the base")
    if problems := [text for code, text in done[len(compared) :] if code]:
        raise SystemExit("\n".join(problems))
    return said


def judged(said: Mapping[str, tuple[int, str]], listed: str) -> list[str]:
    """Prints the results of the comparisons. Returns the errors. `listed`: the new lines of docs/changed-bits.md."""
    failed = []
    for name in CASES:
        code, text = said[name]
        print(f"{name}: {text}")
        if code == 2 or (code == 1 and f"`{name}`" not in listed):
            failed.append(f"{name}: bits changed. If that is intended, add a line with `{name}` to {CHANGES}")
    return failed


def facts_of(record: Path) -> dict[str, object]:
    """Returns the names, shapes, FLOPs and bytes in a record."""
    with safe_open(record, framework="np") as file:
        about = json.loads(file.metadata()["record"])
    quantities = {name: arrays for it in about["measures"].values() for name, arrays in it["quantities"].items()}
    numbers = {name: number for it in about["measures"].values() for name, number in it["facts"].items()}
    shapes = {
        quantity: {name: f"{it['dtype']}{it['shape']}" for name, it in sorted(quantities[quantity].items())}
        for quantity in ("updated parameters", "optimizer state", "activations", "loss")
    }
    return {"facts": numbers, "shapes": shapes}


def facts_differ(found: Mapping[str, object], *, write: bool) -> list[str]:
    """Compares the results of `facts_of` for all cases with the file FACTS, or writes that file. Returns the errors."""
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    if write:
        FACTS.write_text(json.dumps({"versions": versions, "cases": found}, indent=1) + "\n")
        return []
    expected = json.loads(FACTS.read_text())
    parts = ("facts", "shapes") if expected["versions"] == versions else ("shapes",)
    return [
        f"{name}: {part} differ from {FACTS.name}; if that is intended, run python {Path(__file__).name} --write"
        for name in CASES
        for part in parts
        if expected["cases"].get(name, {}).get(part) != json.loads(json.dumps(found[name][part]))
    ]


def run(tree: Path, commands: Sequence[Sequence[str]], scratch: Path) -> list[tuple[int, str]]:
    """Runs commands of trainer.parity with the sources of `tree`. Returns the exit code and the last line of each."""
    env = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {QUICKLY_EXACT}",
        # Programs with the same text are compiled once.
        "JAX_COMPILATION_CACHE_DIR": str(scratch / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    text = json.dumps(commands)
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tree, env=env, input=text, stdout=subprocess.PIPE, text=True)
    lines = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    if len(lines) < len(commands):
        raise SystemExit(f"trainer.parity {' '.join(commands[len(lines)])} in {tree} ended with {done.returncode}")
    return lines


@contextlib.contextmanager
def worktree(commit: str | None, folder: Path) -> Iterator[Path | None]:
    """Checks out `commit` in `folder` for the duration of the context. Yields `folder`, or None if `commit` is None."""
    if commit is None:
        print("HEAD has no parent here, so no bits are compared")
        yield None
        return
    git("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def base_of_head() -> str | None:
    """Returns the commit where this branch left origin/main, or else the first parent of HEAD, or else None."""
    head = git("rev-parse", "HEAD")
    for asked in (("merge-base", "HEAD", "origin/main"), ("rev-parse", "--verify", "--quiet", "HEAD~1")):
        with contextlib.suppress(subprocess.CalledProcessError):
            if (commit := git(*asked)) != head:
                return commit[:12]
    return None


def changes_since(base: str) -> str:
    """Returns the lines that were added to docs/changed-bits.md since `base`, including uncommitted ones."""
    lines = git("diff", base, "--", CHANGES).splitlines()
    return "\n".join(line for line in lines if line.startswith("+"))


def git(*words: str) -> str:
    """Returns the output of a git command in this checkout."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
