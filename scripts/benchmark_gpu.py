"""Measures training steps on one GPU: a few cases that are known to fit into its memory, each in its own process.

    python scripts/benchmark_gpu.py --seconds 300     # the most important cases first, until the time is used up
    python scripts/benchmark_gpu.py --small           # two tiny cases on any platform, to test the script

Prints a row for each case, and writes all results so far to `--output` after each case. A case starts only if the
longest case so far would fit into the remaining time; the first case is assumed to take FIRST seconds. A case that is
still running when the time is over is stopped. MFU is defined as in scripts/check_accelerator.py: the rate of the
model's operations, relative to the published dense bfloat16 peak, even with `quantization`. Each row of a batch is one
document, so that the counted operations equal the executed ones.

`scripts/compile_gpu.py benchmark` compiles the same cases on a machine without a GPU; docs/benchmarks/gpu.md has
results.

Exit code: 0, 1 if a case failed, 2 without an accelerator.
"""

# ruff: noqa: E402

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.runtime.platforms import leave_out_absent_tpu

leave_out_absent_tpu()  # must run before JAX is imported

import jax
from check_accelerator import LARGE, TINY, batch_of, commit, config_of, peak_of

from trainer.training.build import build
from trainer.training.memory import memory_in_use

FIRST = 60  # seconds that the first case is assumed to take
ABSENT = 2  # the exit code without an accelerator
ROUNDS = 4  # the first round warms up
LENGTH = "max_target_length=4096 packing=false dtype=bfloat16"
LAYERS = f"model_name=llama3.1-8b base_num_decoder_layers=8 {LENGTH}"
EXPERTS = (
    "decoder_block=mixtral base_emb_dim=2048 base_num_decoder_layers=8 base_num_query_heads=16 base_num_kv_heads=8 "
    f"head_dim=128 base_moe_mlp_dim=4096 num_experts=8 num_experts_per_tok=2 vocab_size=32768 {LENGTH}"
)


class Case(NamedTuple):
    """A model, its training settings, and the steps per round."""

    name: str
    model: str
    rows: int
    remat_policy: str
    steps: int = 5

    @property
    def keys(self) -> str:
        """The configuration: key=value settings, separated by spaces."""
        return f"{self.model} per_device_batch_size={self.rows} remat_policy={self.remat_policy}"


_SAVED, _EXCEPT_MLP = "minimal_with_context", "save_dot_with_context_except_mlp"
# According to ahead-of-time compilation, these cases fit into the 75 % of the memory that JAX allocates. The most
# important cases come first.
CASES = (
    Case("1.1 B", f"{LARGE} {LENGTH}", 16, _SAVED, steps=3),
    Case("8 layers of 8 B", LAYERS, 4, _SAVED),
    Case("8 layers of 8 B, fp8", f"{LAYERS} quantization=fp8", 4, _SAVED),
    Case("8 layers of 8 B, fp8_gpu", f"{LAYERS} quantization=fp8_gpu", 4, _SAVED),
    Case("experts with capacity", f"{EXPERTS} sparse_matmul=false capacity_factor=1.25", 4, _SAVED),
    Case("experts, dropless", EXPERTS, 4, _SAVED),
    Case("8 layers of 8 B", LAYERS, 8, _EXCEPT_MLP, steps=3),
    Case("1.1 B", f"{LARGE} {LENGTH}", 4, "full"),  # rows and remat_policy as in check_accelerator.py
)
SMALL = (
    Case("tiny", f"{TINY} max_target_length=64", 2, "full", steps=1),
    Case("tiny, fp8", f"{TINY} max_target_length=64 quantization=fp8", 2, _SAVED, steps=1),
)


def measured(case: Case, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns the figures of a case, such as seconds per step, bytes, and FLOP/s per device."""
    began = time.perf_counter()
    run = build(config_of(case.keys), devices)
    step = run.compile_on_leaves()
    compiled, memory = time.perf_counter() - began, step.memory_analysis()
    leaves, batch, times = jax.tree.leaves(run.init()), batch_of(run, 0), []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(case.steps):
            leaves, metrics = step(leaves, batch, ())
        jax.block_until_ready((leaves, metrics))
        times.append((time.perf_counter() - started) / case.steps)
    seconds, kind = statistics.median(times[1:]), devices[0].device_kind
    flops = run.rows * run.config.max_target_length * run.flops_per_token / len(devices) / seconds
    return {
        "attention": run.config.attention,
        "parameters": run.parameters,
        "seconds": seconds,
        "all_seconds": times,
        "flops": flops,
        "mfu": flops / peak if (peak := peak_of(kind)) else None,
        "loss": float(metrics["loss"]),
        "compiled_in": compiled,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "peak_bytes_in_use": memory_in_use(devices),
        "device": kind,
        "devices": len(devices),
        "jax": jax.__version__,
    }


def row(case: Case, found: dict[str, Any]) -> str:
    """Returns a row of the table."""
    cells = [case.name, case.rows, case.remat_policy]
    if "seconds" not in found:
        cells += [found["result"], *[""] * 5]
    else:
        sizes, use = (found["arguments"], found["temporaries"]), found["peak_bytes_in_use"]
        cells += [f"{found['mfu']:.1%}" if found["mfu"] else "no peak", f"{1e3 * found['seconds']:.1f}"]
        cells += [f"{found['flops'] / 1e12:.1f}", " + ".join(f"{size / 1e9:.2f}" for size in sizes)]
        cells += [f"{sum(sizes) / 1e9:.2f}", f"{use / 1e9:.2f}" if use else "not reported"]
    return f"| {' | '.join(map(str, cells))} |"


def in_a_process(index: int, small: bool, seconds: float) -> dict[str, Any]:
    """Measures a case in a new process, so that other cases affect neither its peak memory nor its success."""
    words = [sys.executable, __file__, "--case", str(index), *["--small"] * small]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"result": "stopped, because the time was over"}
    if done.returncode == ABSENT:
        raise SystemExit(ABSENT)
    return (
        {"result": f"FAILED: exit code {done.returncode}"}
        if done.returncode
        else json.loads(done.stdout.splitlines()[-1])
    )


def alone(case: Case, small: bool) -> int:
    """Prints the figures or the error of a case as JSON. Returns the exit code."""
    devices = jax.devices()[:1]
    if devices[0].platform == "cpu" and not small:
        print("error: there is no accelerator; use --small to test the script on a CPU", file=sys.stderr)
        return ABSENT
    try:
        found = measured(case, devices)
    except Exception as error:  # any error is a result of the benchmark
        traceback.print_exc()
        found = {"result": f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:200].replace('|', '/')}"}
    print(json.dumps(found))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--output", type=Path, default=Path("benchmark_gpu.json"))
    parser.add_argument("--small", action="store_true", help="run tiny cases, on any platform")
    parser.add_argument("--case", type=int, help="index of the only case to run, in this process; prints JSON")
    given, began = parser.parse_args(argv), time.monotonic()
    cases = SMALL if given.small else CASES
    if given.case is not None:
        return alone(cases[given.case], given.small)
    report: dict[str, Any] = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "cases": []}
    print(f"JAX {jax.__version__}, commit {report['commit']}, {report['date']}, {given.seconds:g} seconds\n")
    print("| case | rows | `remat_policy` | MFU | ms | TFLOP/s | arguments + temporaries, GB | together | in use |")
    print(f"|{'---|' * 9}", flush=True)
    taken: list[float] = []
    for index, case in enumerate(cases):
        left, started = given.seconds - (time.monotonic() - began), time.monotonic()
        if left < (longest := max(taken, default=FIRST)):
            found = {"result": f"left out: it may take {longest:.0f} seconds, but only {max(left, 0):.0f} are left"}
        else:
            found = in_a_process(index, given.small, left)
            taken.append(time.monotonic() - started)
        report["cases"].append({**case._asdict(), **found})
        given.output.write_text(json.dumps(report, indent=1) + "\n")
        print(row(case, found), flush=True)
    print(f"\n{time.monotonic() - began:.0f} s; {given.output} has all figures")
    return 1 if any(found.get("result", "").startswith("FAILED") for found in report["cases"]) else 0


if __name__ == "__main__":
    sys.exit(main())
