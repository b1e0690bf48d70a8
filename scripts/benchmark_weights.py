"""Speed and memory of reading and writing weights, on a random model of 1 GB in bfloat16. Prints a markdown table.

    python scripts/benchmark_weights.py [GB]

Each row is measured in a process of its own. Memory is the largest resident set (VmHWM), less what the process has
before it starts to read and, where it builds the model, less the model's own bytes. Files are in the page cache.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

WIDTH, MLP, VOCAB, HEADS, HEAD_DIM = 2048, 5632, 32000, 16, 128
LAYER = WIDTH * WIDTH * 4 + 3 * WIDTH * MLP + 2 * WIDTH
TABLES = 2 * VOCAB * WIDTH + WIDTH


def words(layers: int) -> list[str]:
    """The keys of the model."""
    sizes = {
        "base_emb_dim": WIDTH,
        "base_mlp_dim": MLP,
        "vocab_size": VOCAB,
        "base_num_query_heads": HEADS,
        "base_num_kv_heads": HEADS,
        "head_dim": HEAD_DIM,
        "base_num_decoder_layers": layers,
        "logits_via_embedding": "false",
        "weight_dtype": "bfloat16",
    }
    return [f"{key}={value}" for key, value in sizes.items()]


def make(folder: Path, layers: int) -> None:
    """A Hugging Face directory of random weights, written by the trainer itself."""
    import ml_dtypes
    import numpy as np

    from trainer.checkpoint import Leaf, model_config, write_huggingface
    from trainer.export import parameter_shapes

    config = model_config({}, words(layers), "")
    random = np.random.default_rng(0)
    dtype = np.dtype(ml_dtypes.bfloat16)

    def values(shape: tuple[int, ...]) -> np.ndarray:
        return random.integers(0, 0x3F80, shape, np.uint16).view(dtype)

    def leaf(name: str, shape: tuple[int, ...]) -> Leaf:
        stacked = name.startswith("decoder/layers/")
        parts = [lambda: values(shape[1:])] * shape[0] if stacked else [lambda: values(shape)]
        return Leaf(shape, dtype, parts)

    folder.mkdir()
    leaves = {name: leaf(name, shape) for name, shape in parameter_shapes(config).items()}
    write_huggingface(folder, config, leaves, None, {})


def load(folder: Path, layers: int, weight_dtype: str) -> dict[str, float]:
    """`load_parameters` onto one CPU device."""
    import jax

    from trainer.checkpoint import load_parameters, model_config, nested
    from trainer.export import parameter_shapes

    config = model_config({}, words(layers), "")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = nested(
        {
            name: jax.ShapeDtypeStruct(shape, weight_dtype, sharding=sharding)
            for name, shape in parameter_shapes(config).items()
        }
    )
    before, started = resident("VmRSS"), time.perf_counter()
    params = jax.block_until_ready(load_parameters(str(folder), config, abstract, print))
    seconds = time.perf_counter() - started
    model = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {"seconds": seconds, "memory": resident("VmHWM") - before - model}


def export(source: Path, target: Path, *options: str) -> dict[str, float]:
    """`trainer.export`, less the time and memory of its imports."""
    import jax

    import trainer.checkpoint
    from trainer.export import main, parameter_shapes

    parameter_shapes(trainer.checkpoint.model_config({}, [], ""))
    jax.devices()
    from orbax.checkpoint import v1  # noqa: F401

    before, started = resident("VmRSS"), time.perf_counter()
    main([str(source), str(target), *options])
    return {"seconds": time.perf_counter() - started, "memory": resident("VmHWM") - before}


def resident(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    line = next(it for it in Path("/proc/self/status").read_text().splitlines() if it.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Makes the model, measures each row, prints the table."""
    if len(sys.argv) > 2:
        name, *rest = sys.argv[1:]
        folder, layers = Path(rest[0]), int(rest[1])
        if name == "make":
            make(folder, layers)
        elif name == "load":
            print(json.dumps(load(folder, layers, rest[2])))
        else:
            print(json.dumps(export(folder, Path(rest[2]), *rest[3:])))
        return
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    layers = max(1, round((gigabytes * 5e8 - TABLES) / LAYER))
    size = 2 * (layers * LAYER + TABLES)
    with tempfile.TemporaryDirectory() as temporary:
        hf, params = Path(temporary) / "hf", Path(temporary) / "params"
        measure("make", hf, layers)
        rows = {
            "load Hugging Face, bfloat16": measure("load", hf, layers, "bfloat16"),
            "load Hugging Face as float32": measure("load", hf, layers, "float32"),
            "export Hugging Face -> params": measure("export", hf, layers, params, "format=params"),
            "load params, bfloat16": measure("load", params, layers, "bfloat16"),
            "export params -> Hugging Face": measure("export", params, layers, Path(temporary) / "back", "format=hf"),
            "export Hugging Face -> Hugging Face": measure("export", hf, layers, Path(temporary) / "copy", "format=hf"),
        }
    stack = 2 * layers * WIDTH * MLP
    print(f"{layers} layers, {size / 1e9:.2f} GB in bfloat16; the largest stacked tensor has {stack / 1e6:.0f} MB\n")
    print("| | seconds | MB/s | memory above the model, MB |\n|---|---|---|---|")
    for label, row in rows.items():
        print(f"| {label} | {row['seconds']:.1f} | {size / 1e6 / row['seconds']:.0f} | {row['memory'] / 1e6:.0f} |")


def measure(name: str, *arguments: object) -> dict[str, float]:
    """One row, in a process of its own; its last line is the result."""
    command = [sys.executable, __file__, name, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}


if __name__ == "__main__":
    main()
