"""Compares ring attention on one device with the other attention ops: times, temporaries and numerical differences.

    python scripts/benchmark_ring.py [--tokens 4096,16384] [--window 1024]

Times are measured with one row, 16 query and 8 key-value heads of width 128. They are medians of 5 rounds in which the
programs run in turns. The plain op is omitted above 8192 tokens.

Differences are measured with 4 query and 2 key-value heads. The reference is the plain op in float32 with products in
full precision; differences are relative to the largest entry. "tf32" is JAX's default for float32 products on recent
GPUs.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.ops.attention import Mask, dot_product_attention
from trainer.ops.blockwise import blockwise_attention
from trainer.ops.cudnn import cudnn_attention
from trainer.ops.ring import Ring, ring_attention

PLAIN, WIDTH, ROUNDS, CALLS = "dot_product", 128, 5, 3


def main() -> None:
    """Prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--window", type=int, default=1024)
    given = parser.parse_args()
    cases = list(itertools.product(map(int, given.tokens.split(",")), (0, given.window)))
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}\n")
    print("| tokens | window | dtype | op | ms | ms with gradients | temporaries, MB |\n|---|---|---|---|---|---|---|")
    for (length, window), dtype in itertools.product(cases, ("bfloat16", "float32")):
        times(length, window, dtype)
    print("\n| tokens | window | dtype | op | result | gradients of queries, keys, values |\n|---|---|---|---|---|---|")
    for length, window in cases:
        differences(length, window)


def ops_of(length: int, window: int, dtype: str, blocks: Sequence[int]) -> dict[str, Callable[..., jax.Array]]:
    """Returns the attention ops by name, as functions of queries, keys and values for a row of one document."""
    index = jnp.arange(length)[None]
    mask = Mask(index, index, jnp.ones_like(index), jnp.ones_like(index))
    made: dict[str, Callable[..., jax.Array]] = {
        PLAIN: lambda q, k, v: dot_product_attention(q, k, v, mask, window=window),
        "blockwise": lambda q, k, v: blockwise_attention(q, k, v, mask, window=window),
    }
    if jax.default_backend() == "gpu" and dtype == "bfloat16":
        made["cudnn_flash_jax"] = lambda q, k, v: cudnn_attention(q, k, v, mask, window=window)
    for block in blocks:
        ring = Ring(window=window, block=block)
        made[f"ring, block {block}"] = lambda q, k, v, ring=ring: ring_attention(q, k, v, mask, ring=ring)
    return made


def inputs_of(length: int, heads: int, kv_heads: int, dtype: str) -> list[jax.Array]:
    """Returns queries, keys, values and the gradient of the result. Every number is exact in bfloat16."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = heads, kv_heads, kv_heads, heads
    drawn = [
        jax.random.normal(key, (1, length, count, WIDTH), "bfloat16") for key, count in zip(keys, counts, strict=True)
    ]
    return [x.astype(dtype) for x in drawn]


def with_gradients(op: Callable[..., jax.Array]) -> Any:
    """Returns a jitted function that returns the result of `op` and the gradients of queries, keys and values."""

    @jax.jit
    def both(*inputs: jax.Array) -> Any:
        out, pull = jax.vjp(op, *inputs[:3])
        return out, *pull(inputs[3])

    return both


def times(length: int, window: int, dtype: str) -> None:
    """Prints rows of the first table."""
    inputs = inputs_of(length, 16, 8, dtype)
    programs: dict[str, Any] = {}
    for name, op in ops_of(length, window, dtype, (512, 1024, 2048)).items():
        if name != PLAIN or length <= 8192:
            pair = (jax.jit(op), inputs[:3]), (with_gradients(op), inputs)
            programs[name] = [(fn.lower(*args).compile(), args) for fn, args in pair]
    taken: dict[tuple[str, int], list[float]] = {(name, i): [] for name in programs for i in range(2)}
    for _ in range(ROUNDS + 1):
        for (name, i), rounds in taken.items():
            run, args = programs[name][i]
            began = time.perf_counter()
            jax.block_until_ready([run(*args) for _ in range(CALLS)])
            rounds.append((time.perf_counter() - began) / CALLS * 1e3)
    for name, (_, (both, _)) in programs.items():
        shown = [statistics.median(taken[name, i][1:]) for i in range(2)]  # the first round warms up
        memory = both.memory_analysis().temp_size_in_bytes / 1e6
        print(
            f"| {length} | {window} | {dtype} | {name} | {shown[0]:.2f} | {shown[1]:.2f} | {memory:.0f} |", flush=True
        )


def differences(length: int, window: int) -> None:
    """Prints rows of the second table."""

    def found(op: Callable[..., jax.Array], dtype: str, precision: str | None) -> list[np.ndarray]:
        with jax.default_matmul_precision(precision):
            return [np.asarray(x, np.float32) for x in with_gradients(op)(*inputs_of(length, 4, 2, dtype))]

    right = found(ops_of(length, window, "float32", ())[PLAIN], "float32", "highest")
    for dtype, precision, shown in (
        ("float32", "highest", "float32"),
        ("float32", None, "tf32"),
        ("bfloat16", None, "bfloat16"),
    ):
        for name, op in ops_of(length, window, dtype, (512,)).items():
            if (name, precision) != (PLAIN, "highest"):
                pairs = zip(found(op, dtype, precision), right, strict=True)
                out, *grads = (f"{np.max(np.abs(a - b)) / np.max(np.abs(b)):.1e}" for a, b in pairs)
                print(f"| {length} | {window} | {shown} | {name} | {out} | {', '.join(grads)} |", flush=True)


if __name__ == "__main__":
    main()
