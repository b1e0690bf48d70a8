"""Compiles for an NVIDIA GPU on a machine without one, and prints the kernels and the memory of each program.

    python3.12 -m venv v && v/bin/pip install 'jax[cuda12]' -e .
    v/bin/python scripts/compile_gpu.py attention               # each way in which rows hold documents
    v/bin/python scripts/compile_gpu.py step [key=value ...]    # the training step of scripts/check_accelerator.py
    v/bin/python scripts/compile_gpu.py benchmark [INDEX ...]   # the cases of scripts/benchmark_gpu.py

XLA's compiler for GPUs needs neither a driver nor a GPU, and plans the memory of a program as for a real one. It does
not choose the fastest kernel of each product, which it would measure. docs/benchmarks/gpu.md has the tables.
"""

import argparse
import collections
import importlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # of this process; it compiles for another

import jax
import jax.numpy as jnp
from benchmark_gpu import CASES, Case
from check_accelerator import ACCELERATOR, FIXED, config_of
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from trainer.config.load import load
from trainer.ops.attention import Mask
from trainer.ops.cudnn import cudnn_attention
from trainer.training.build import build

# Devices of a topology do not list their memories. Those of a GPU have pinned host memory.
importlib.import_module("trainer.training.build").check_offload = lambda *_: None
# XLA's GpuTargetConfig of an H200, with the memory that its driver reports.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4917248000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150123577344
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H200"
"""
POLICIES = ("full", "minimal_with_context", "save_dot_with_context_except_mlp", "custom")
ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 4, 4096, 16, 8, 128


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attention", "step", "benchmark"))
    parser.add_argument("words", nargs="*", help="of the step's configuration, or cases of the benchmark")
    given = parser.parse_args()
    devices = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1").devices
    print(f"{devices[0].device_kind}, JAX {jax.__version__}\n")
    rows = {"attention": lambda: attention(devices[0]), "step": lambda: steps(devices, given.words)}
    rows["benchmark"] = lambda: benchmark(devices, [CASES[int(word)] for word in given.words] or CASES)
    for row in rows[given.what]():
        print(f"| {' | '.join(row)} |", flush=True)


def attention(device: Any) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table of attention alone, forward and backward."""
    yield "documents", "kernels", "temporaries, MB"
    yield "---", "---", "---"
    here = SingleDeviceSharding(device)

    def shaped(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    arrays = [shaped(ROWS, LENGTH, heads, WIDTH, dtype=jnp.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    segments = Mask(*[shaped(ROWS, LENGTH)] * 4)
    masks = {"any number: a bias": segments}
    masks |= {
        name: segments._replace(documents=shaped(ROWS, most))
        for name, most in {
            "up to 7: offsets": 8,
            "up to 31: offsets": 32,
            "one, and padding: lengths": 1,
            "one to the end: nothing": 0,
        }.items()
    }
    for name, mask in masks.items():
        compiled = jax.jit(with_gradients(cudnn_attention)).lower(*arrays, mask).compile()
        yield name, kernels(compiled.as_text()), f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:.0f}"


def with_gradients(op: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns the gradients of the op's result, multiplied by itself, for queries, keys and values."""

    def loss(*args: Any) -> jax.Array:
        return jnp.square(op(*args).astype(jnp.float32)).sum()

    return jax.grad(loss, argnums=(0, 1, 2))


def steps(devices: Sequence[Any], words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table of the training step, for each policy of rematerialization."""
    yield "remat_policy", "loop", "kernels", "arguments, GB", "temporaries, GB", "compiled in"
    yield ("---",) * 6
    given = dict(word.partition("=")[::2] for word in words)
    policies = [given["remat_policy"]] if "remat_policy" in given else POLICIES
    loops = [given["scan_layers"]] if "scan_layers" in given else ("true", "false")
    for policy, scan in itertools.product(policies, loops):
        keys = [f"remat_policy={policy}", f"scan_layers={scan}", "context=offload", *words]
        run = build(load(["base.yml", *FIXED, *ACCELERATOR.model.split(), *keys]).config, devices)
        began = time.monotonic()
        compiled = run.step.lower(*run.abstract_args()).compile()
        memory = compiled.memory_analysis()
        bytes_of = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        name = "custom, context=offload" if policy == "custom" else policy
        loop = "rolled" if scan == "true" else "unrolled"
        seconds = f"{time.monotonic() - began:.0f} s"
        yield name, loop, kernels(compiled.as_text()), *(f"{size / 1e9:.2f}" for size in bytes_of), seconds


def benchmark(devices: Sequence[Any], cases: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table of the benchmark's cases. `together` has a share of the memory of the GPU."""
    memory = int(re.findall(r"device_memory_size: (\d+)", H200)[0])
    yield "case", "rows", "remat_policy", "kernels", "arguments, GB", "temporaries, GB", "together", "products"
    yield ("---",) * 8
    for case in cases:
        run = build(config_of(case.keys), devices)
        compiled = run.step.lower(*run.abstract_args()).compile()
        found, text = compiled.memory_analysis(), compiled.as_text()
        sizes = found.argument_size_in_bytes, found.temp_size_in_bytes
        together = f"{sum(sizes) / 1e9:.2f}, {sum(sizes) / memory:.0%}"
        names = case.name, str(case.rows), case.remat_policy
        yield *names, kernels(text), *(f"{size / 1e9:.2f}" for size in sizes), together, products(text)


def products(text: str) -> str:
    """Returns how many products of matrices a compiled program has, by the types of their operands."""
    types = dict(re.findall(r"^\s*(?:ROOT )?(%[\w.-]+) = (\w+)\[", text, re.MULTILINE))
    pairs = re.findall(r" dot\((%[\w.-]+), (%[\w.-]+)\)", text)
    found = collections.Counter(" x ".join(sorted({types[one] for one in pair})) for pair in pairs)
    return ", ".join(f"{count} of {what}" for what, count in found.most_common())


def kernels(text: str) -> str:
    """Returns the calls of cuDNN's attention in a compiled program, and what their configuration says."""
    found = collections.Counter()
    for name, config in re.findall(r'custom_call_target="__cudnn\$fmha(\w+)".*?backend_config=(\{.*\})', text):
        config = json.loads(config)["cudnn_fmha_backend_config"]
        window, segments = config.get("sliding_window_length", 0), int(config.get("max_seg_per_batch", 1))
        more = [f"window {window}"] * bool(window) + [f"{segments} segments"] * (segments > 1)
        found[", ".join([name, config["mask_type"], *more])] += 1
    return "; ".join(f"{count} x {what}" for what, count in found.items()) or "none"


if __name__ == "__main__":
    main()
