"""Compares a recurrent layer with attention of the same width: the table of docs/benchmarks/recurrent.md.

    python scripts/benchmark_recurrent.py [--lengths 2048,8192,32768] [--times 3]

For each length and for one layer of each kind, it prints the CPU seconds of a forward and backward pass, and the
temporaries of the compiled pass. The layers run in turns, and each time is the minimum of several runs. Attention uses
the op `blockwise`.
"""

import argparse
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainer.layers.attention import Attention
from trainer.layers.delta_net import GatedDeltaNet
from trainer.ops.rope import Rope
from trainer.products.context import Context

WIDTH = 512
DTYPES: Any = {"dtype": jnp.dtype("float32"), "weight_dtype": jnp.dtype("float32")}


def layers() -> dict[str, nnx.Module]:
    """Returns both layers, with heads of the same width. Attention has 4 query heads and 2 key-value heads; the
    recurrent layer has 2 key heads and 4 value heads."""
    heads: Any = {"key_heads": 2, "value_heads": 4, "key_dim": 128, "value_dim": 128}
    recurrent = GatedDeltaNet(WIDTH, **heads, conv=4, chunk=64, epsilon=1e-6, rngs=nnx.Rngs(0), **DTYPES)
    of_attention: Any = {"heads": 4, "kv_heads": 2, "head_dim": 128, "gated": True, "op": "blockwise"}
    attention = Attention(WIDTH, rope=Rope(1, 10_000), **of_attention, rngs=nnx.Rngs(0), **DTYPES)
    return {"recurrent": recurrent, "attention": attention}


def step(layer: nnx.Module, length: int) -> tuple[Any, tuple[Any, ...]]:
    """Returns the compiled forward and backward pass of a row, and its arguments."""
    graphdef, state = nnx.split(layer)
    positions = jnp.arange(length)[None]
    context = Context(positions, jnp.ones_like(positions), jnp.zeros(1, int), None)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        out, _ = nnx.merge(graphdef, state)(x, None, context)
        return (out * out).mean()

    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, length, WIDTH)), jnp.float32)
    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(state, x).compile(), (state, x)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    print("| tokens | CPU s: recurrent | attention | ratio | temporaries: recurrent | attention |")
    print("|---|---|---|---|---|---|")
    for length in map(int, given.lengths.split(",")):
        programs = {name: step(layer, length) for name, layer in layers().items()}
        least = dict.fromkeys(programs, math.inf)
        for _ in range(given.times + 1):  # the first run warms up
            for name, (program, arguments) in programs.items():
                begun = time.process_time()
                jax.block_until_ready(program(*arguments))
                least[name] = min(least[name], time.process_time() - begun)
        used = {name: it.memory_analysis().temp_size_in_bytes / 1e6 for name, (it, _) in programs.items()}
        one, other = least["recurrent"], least["attention"]
        print(
            f"| {length} | {one:.2f} | {other:.2f} | {one / other:.2f} "
            f"| {used['recurrent']:.0f} MB | {used['attention']:.0f} MB |"
        )


if __name__ == "__main__":
    main()
