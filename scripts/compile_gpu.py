"""Compiles for an NVIDIA GPU on a machine without one, and prints the kernels and the memory of each program.

    python3.12 -m venv v && v/bin/pip install -e '.[gpu-aot]'
    v/bin/python scripts/compile_gpu.py attention               # for each way to describe documents to the kernel
    v/bin/python scripts/compile_gpu.py step [key=value ...]    # the training step of scripts/check_accelerator.py
    v/bin/python scripts/compile_gpu.py benchmark [INDEX ...]   # the cases of scripts/benchmark_gpu.py
    v/bin/python scripts/compile_gpu.py products                # FLOPs of whole models, compared with a formula

XLA's compiler for GPUs needs neither a driver nor a GPU, and plans a program's memory as it would for a real GPU. But
it does not choose the fastest kernel for each product, because it cannot measure them. docs/benchmarks/gpu.md has the
tables.
"""

import argparse
import collections
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # the platform of this process, which compiles for another platform

import jax
import jax.numpy as jnp
from benchmark_gpu import CASES, Case
from check_accelerator import ACCELERATOR, FIXED, config_of
from jax.sharding import SingleDeviceSharding

from trainer.aot.chips import CHIPS
from trainer.aot.topologies import devices_of
from trainer.config.load import load
from trainer.config.topologies import topologies
from trainer.models.flops import matmul_parameters
from trainer.ops.attention import Mask
from trainer.ops.cudnn import cudnn_attention
from trainer.train_compile import compile_for_topology
from trainer.training.build import build

POLICIES = ("full", "minimal_with_context", "save_dot_with_context_except_mlp", "custom")
FIXED_OF_MODELS = ["dataset_type=synthetic", "packing=false", "remat_policy=full", "attention=cudnn_flash_jax"]
MODELS = (
    "model_name=llama2-7b compile_topology=h100-8 ici_fsdp_parallelism=8 per_device_batch_size=1 "
    "max_target_length=2048",
    "model_name=qwen3-1.7b compile_topology=a100-4 compile_topology_num_slices=2 ici_fsdp_parallelism=4 "
    "per_device_batch_size=2 max_target_length=4096",
    "model_name=llama3.1-8b compile_topology=b200-8 ici_fsdp_parallelism=4 ici_tensor_parallelism=2 "
    "per_device_batch_size=1 max_target_length=8192",
)
ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 4, 4096, 16, 8, 128


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attention", "step", "benchmark", "products"))
    parser.add_argument("words", nargs="*", help="key=value for step, or indices of cases for benchmark")
    given = parser.parse_args()
    devices = devices_of(topologies()["h200-1"])
    print(f"{devices[0].device_kind}, JAX {jax.__version__}\n")
    rows = {"attention": lambda: attention(devices[0]), "step": lambda: steps(devices, given.words)}
    rows["products"] = products_of_models
    rows["benchmark"] = lambda: benchmark(devices, [CASES[int(word)] for word in given.words] or CASES)
    for row in rows[given.what]():
        print(f"| {' | '.join(row)} |", flush=True)


def attention(device: Any) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table of attention alone, with gradients."""
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
        yield name, kernels(compiled.as_text() or ""), f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:.0f}"


def with_gradients(op: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns a function that computes the gradients of the sum of the op's squared outputs with respect to queries,
    keys and values."""

    def loss(*args: Any) -> jax.Array:
        return jnp.square(op(*args).astype(jnp.float32)).sum()

    return jax.grad(loss, argnums=(0, 1, 2))


def steps(devices: Sequence[Any], words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table of the training step, by rematerialization policy."""
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
    """Yields the rows of the table of the benchmark's cases. The column `together` has the sum of arguments and
    temporaries, in GB and as a share of the GPU's memory."""
    memory = CHIPS["h200"].hbm_bytes
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


def products_of_models() -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table of products: FLOPs of the compiled step, and FLOPs by a closed form."""
    yield "model", "TFLOP compiled", "closed form", "arguments, GB", "temporaries, GB", "at least, ms", "compiled in"
    yield ("---",) * 7
    for words in MODELS:
        run, _, found = compile_for_topology(load(["base.yml", *FIXED_OF_MODELS, *words.split()]).config)
        config, tokens = run.config, run.rows * run.config.max_target_length / found.devices
        counted = sum(found.cost.matmul_flops.values())
        parameters, layers = matmul_parameters(config), config.base_num_decoder_layers
        # remat_policy=full runs each block's forward pass again, without its last product.
        again = parameters - config.base_emb_dim * (config.vocab_size + layers * config.base_mlp_dim)
        scores = layers * tokens * (config.max_target_length + 1) / 2 * config.base_num_query_heads * config.head_dim
        closed = 2 * tokens * (3 * parameters + again) + 2 * 9 * scores
        sizes = (found.memory.arguments, found.memory.temporaries)
        name = f"{config.model_name}, {found.topology} x {found.num_slices}"
        times = f"{1e3 * found.estimate.seconds:.0f}", f"{found.compile_seconds:.0f} s"
        yield name, f"{counted / 1e12:.3f}", f"{closed / 1e12:.3f}", *(f"{size / 1e9:.2f}" for size in sizes), *times


def products(text: str) -> str:
    """Returns, as text, how many matrix products a compiled program contains, by the types of their operands."""
    types = dict(re.findall(r"^\s*(?:ROOT )?(%[\w.-]+) = (\w+)\[", text, re.MULTILINE))
    pairs = re.findall(r" dot\((%[\w.-]+), (%[\w.-]+)\)", text)
    found = collections.Counter(" x ".join(sorted({types[one] for one in pair})) for pair in pairs)
    return ", ".join(f"{count} of {what}" for what, count in found.most_common())


def kernels(text: str) -> str:
    """Returns, as text, the calls of cuDNN's attention in a compiled program, with their settings."""
    found = collections.Counter()
    for name, config in re.findall(r'custom_call_target="__cudnn\$fmha(\w+)".*?backend_config=(\{.*\})', text):
        config = json.loads(config)["cudnn_fmha_backend_config"]
        window, segments = config.get("sliding_window_length", 0), int(config.get("max_seg_per_batch", 1))
        more = [f"window {window}"] * bool(window) + [f"{segments} segments"] * (segments > 1)
        found[", ".join([name, config["mask_type"], *more])] += 1
    return "; ".join(f"{count} x {what}" for what, count in found.items()) or "none"


if __name__ == "__main__":
    main()
