"""Measures the attention kernels and a model of 1.1 B parameters on one accelerator, and prints a Markdown report.

    python scripts/benchmark_kernels.py > docs/benchmarks/accelerator.md

Everything runs in one process on the first device. The rate of a large matrix product is measured alternately with the
training steps, so that both see the same clock rates and temperature. Compare the share of that rate. Without an
accelerator, sizes are tiny: this only shows that the script works, and says nothing about a kernel.

Fixed: MODEL (sizes, dtype, remat_policy, optimizer), rows and lengths, and the FLOP convention of models/flops.py: a
multiplication and an addition are two operations, 6 per parameter of a matrix product and token, causal attention
counts half of the square, and recomputation for rematerialization does not count.
"""

# ruff: noqa: E402

import contextlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from trainer.runtime.platforms import leave_out_absent_tpu

leave_out_absent_tpu()  # before JAX is imported

import jax
import jax.numpy as jnp

from trainer.config import load
from trainer.data import train_batch
from trainer.data.synthetic import SyntheticRows
from trainer.ops.attention import Mask, dot_product_attention
from trainer.ops.blockwise import blockwise_attention
from trainer.ops.cudnn import cudnn_attention
from trainer.ops.splash import splash_attention
from trainer.runtime.place import place
from trainer.training import build

ROUNDS = 5


class Sizes(NamedTuple):
    """The sizes of the measurements."""

    matrix: int  # side of the matrices of the product
    chain: int  # products in one program
    attention: tuple[int, int, int, int]  # rows, heads, key-value heads, width of a head
    lengths: tuple[int, ...]
    steps: int  # training steps in a round
    model: dict[str, Any]


MODEL = {
    "decoder_block": "llama2",
    "base_emb_dim": 2048,
    "base_num_decoder_layers": 16,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 8,
    "head_dim": 128,
    "base_mlp_dim": 8192,
    "vocab_size": 32768,
    "max_target_length": 4096,
    "per_device_batch_size": 4,
    "remat_policy": "full",
    "dtype": "bfloat16",
    "weight_dtype": "float32",
    "opt_type": "adamw",
}
TINY = MODEL | {
    "base_emb_dim": 64,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 128,
    "vocab_size": 256,
    "max_target_length": 128,
    "dtype": "float32",
}
ACCELERATOR = Sizes(8192, 20, (4, 16, 8, 128), (2048, 4096, 8192), 10, MODEL)
CPU = Sizes(256, 4, (2, 4, 2, 16), (512,), 2, TINY)
# Each attention op with the platforms on which it runs. The first is the plain op.
OPS: dict[str, tuple[Callable[..., jax.Array], tuple[str, ...]]] = {
    "dot_product": (dot_product_attention, ("cpu", "gpu", "tpu")),
    "blockwise": (blockwise_attention, ("cpu", "gpu", "tpu")),
    "splash": (splash_attention, ("tpu",)),
    "cudnn_flash_jax": (cudnn_attention, ("gpu",)),
}


@contextlib.contextmanager
def unless_too_large(row: str) -> Iterator[None]:
    """Prints `row` instead of an error about the device's memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(row, flush=True)


def seconds(fn: Callable[[], Any]) -> float:
    """Returns the seconds until the result of `fn()` is available."""
    started = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - started


def matmul(sizes: Sizes, dtype: str) -> Callable[[], float]:
    """Returns a function that measures the FLOP/s of a chain of matrix products."""
    ones = jnp.full((sizes.matrix, sizes.matrix), 1 / sizes.matrix, dtype)

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, sizes.chain, lambda _, y: y @ ones, x)

    seconds(lambda: chain(ones))
    return lambda: 2 * sizes.matrix**3 * sizes.chain / seconds(lambda: chain(ones))


def attention(sizes: Sizes, length: int, dtype: str, platform: str) -> None:
    """Prints a row for each op: its seconds forward and with the backward pass, and its difference from the plain
    op."""
    rows, heads, kv_heads, width = sizes.attention
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, kv_heads, kv_heads, heads)
    *inputs, cotangent = (
        jax.random.normal(key, (rows, length, count, width), dtype) for key, count in zip(keys, counts, strict=True)
    )
    positions, segments = jnp.broadcast_to(jnp.arange(length), (rows, length)), jnp.ones((rows, length), jnp.int32)
    mask, plain = Mask(positions, segments, positions, segments), None
    for name, (op, platforms) in OPS.items():
        if platform not in platforms:
            continue

        def both(*args: jax.Array, op: Callable[..., jax.Array] = op) -> Any:
            out, pull = jax.vjp(lambda q, k, v: op(q, k, v, mask), *args)
            return out, pull(cotangent)

        forward = jax.jit(lambda q, k, v, op=op: op(q, k, v, mask))
        backward = jax.jit(both)
        with unless_too_large(f"| {length} | {name} | does not fit | | |"):
            found = jax.block_until_ready((forward(*inputs), backward(*inputs)))[1]
            times = [[seconds(lambda fn=fn: fn(*inputs)) for _ in range(ROUNDS)] for fn in (forward, backward)]
            plain = plain or (name, found)
            pairs = zip(jax.tree.leaves(found), jax.tree.leaves(plain[1]), strict=True)
            far = max(float(jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)))) for a, b in pairs)
            first, second = (1e3 * statistics.median(each) for each in times)
            print(f"| {length} | {name} | {first:.3f} | {second:.3f} | {far:.1e} from {plain[0]} |", flush=True)


def training(sizes: Sizes, measure: Callable[[], float], op: str) -> None:
    """Prints a row for training steps with the attention `op`."""
    keys = sizes.model | {"attention": op, "dataset_type": "synthetic", "eval_interval": -1, "steps": 1000}
    run = build(load([f"{key}={value}" for key, value in keys.items()]).config, jax.devices()[:1])
    length = run.config.max_target_length
    source = SyntheticRows(length, run.config.vocab_size, seed=0)
    batch = place(train_batch(source, 0, run.rows, seed=0, shuffle=False), run.batch_shardings, run.rows)
    step, leaves = run.compile_on_leaves(), jax.tree.leaves(run.init())
    memory = step.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    rates, peaks = [], []
    for i in range(ROUNDS + 1):
        started = time.perf_counter()
        for _ in range(sizes.steps):
            leaves, metrics = step(leaves, batch, ())
        jax.block_until_ready((leaves, metrics))
        elapsed = (time.perf_counter() - started) / sizes.steps
        if i:  # the first round warms up
            rates.append(run.rows * length / elapsed)
            peaks.append(measure())
    rate, peak = statistics.median(rates), statistics.median(peaks)
    flops = rate * run.flops_per_token
    print(
        f"| {run.config.attention} | {run.parameters / 1e6:.1f} | {run.rows} x {length} | {rate:.0f} "
        f"| {flops / 1e12:.3f} | {peak / 1e12:.3f} | {100 * flops / peak:.1f} % | {needed / 2**30:.2f} |",
        flush=True,
    )


def main() -> None:
    """Prints the report."""
    device = jax.devices()[0]
    platform = device.platform
    sizes, dtype = (CPU, "float32") if platform == "cpu" else (ACCELERATOR, "bfloat16")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    print("# Kernels and a model on one device\n")
    print(f"`python scripts/benchmark_kernels.py`, commit {commit.strip()}, ", end="")
    print(f"{time.strftime('%Y-%m-%d')}; {device.device_kind} ({platform}), JAX {jax.__version__}.\n")
    if platform == "cpu":
        print("**Tiny sizes on a CPU: this shows that the script works, and nothing else.**\n")
    measure = matmul(sizes, dtype)
    peak = statistics.median(measure() for _ in range(ROUNDS))
    side = sizes.matrix
    print(f"Product of {side} x {side} matrices in {dtype}: {peak / 1e12:.3f} TFLOP/s, median of {ROUNDS}.\n")
    rows, heads, kv_heads, width = sizes.attention
    print(f"## Attention\n\n{rows} rows, {heads} heads of {width} ({kv_heads} key-value), {dtype}, causal.\n")
    print("| tokens | op | forward, ms | with backward, ms | largest difference |\n|---|---|---|---|---|")
    for length in sizes.lengths:
        attention(sizes, length, dtype, platform)
    model = " ".join(f"{key}={value}" for key, value in sizes.model.items())
    print(f"\n## Training\n\n`{model}`\n\nThe share is that of model FLOP/s in the matrix product's, in turns.\n")
    print("| attention | parameters, M | rows x tokens | tokens/s | model TFLOP/s | product TFLOP/s | share | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for op in ("flash", "dot_product"):
        with unless_too_large(f"| {op} | does not fit | | | | | | |"):
            training(sizes, measure, op)


if __name__ == "__main__":
    main()
