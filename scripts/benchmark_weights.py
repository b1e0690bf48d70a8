"""Measures speed and memory of reading and writing the weights of a random bfloat16 model. Prints a Markdown table.

    python scripts/benchmark_weights.py [GB]

The model has 1 GB by default. Each row is measured in its own process. Memory is the peak resident set (VmHWM) minus
the memory that the process uses before it starts to read. For loading, the parameters that have been loaded, including
the current one, are subtracted, too, because CPU devices keep them in this process's memory. Files are in the page
cache.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

WIDTH, MLP, VOCAB, HEADS, HEAD_DIM = 2048, 5632, 32000, 16, 128
LAYER = WIDTH * WIDTH * 4 + 3 * WIDTH * MLP + 2 * WIDTH
TABLES = 2 * VOCAB * WIDTH + WIDTH
EIGHT = ("ici_fsdp_parallelism=4", "ici_tensor_parallelism=2")


def words(layers: int) -> list[str]:
    """Returns the configuration of the model as key=value arguments."""
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
    """Writes a Hugging Face directory of random weights, with the trainer's own code."""
    import ml_dtypes
    import numpy as np

    from trainer.leaves.source import Leaf
    from trainer.weights.huggingface.write import write_huggingface
    from trainer.weights.model_keys import model_config
    from trainer.weights.open import weight_shapes

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
    leaves = {name: leaf(name, shape) for name, shape in weight_shapes(config).items()}
    write_huggingface(folder, config, leaves, None)


def load(folder: Path, layers: int, weight_dtype: str, *keys: str) -> dict[str, float]:
    """Measures `load_parameters` for the available CPU devices, with shardings defined by `keys`."""
    import jax
    from orbax.checkpoint import v1  # noqa: F401

    import trainer.weights.load as loading
    from trainer.config.load import load
    from trainer.training.build import build

    given = ["base.yml", "dataset_type=synthetic", *words(layers), f"weight_dtype={weight_dtype}", *keys]
    run = build(load(given).config, jax.devices())
    abstract = run.codec.unpack(run.abstract_args()[0]).params
    place, loaded, above = loading.place, 0, 0

    def measured(*arguments: Any) -> jax.Array:
        nonlocal loaded, above
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        array = jax.block_until_ready(place(*arguments))
        loaded += array.nbytes
        above = max(above, resident("VmHWM") - before - loaded)
        return array

    loading.place = measured
    before, started = resident("VmRSS"), time.perf_counter()
    loading.load_parameters(str(folder), run.config, abstract, print)
    return {"seconds": time.perf_counter() - started, "memory": above}


def export(source: Path, target: Path, *options: str) -> dict[str, float]:
    """Measures `trainer.export`, without the time and memory of its imports."""
    import jax

    from trainer.export import main
    from trainer.weights.model_keys import model_config
    from trainer.weights.open import weight_shapes

    weight_shapes(model_config({}, [], ""))
    jax.devices()
    from orbax.checkpoint import v1  # noqa: F401

    before, started = resident("VmRSS"), time.perf_counter()
    main([str(source), str(target), *options])
    return {"seconds": time.perf_counter() - started, "memory": resident("VmHWM") - before}


def resident(name: str) -> int:
    """Returns a field of /proc/self/status in bytes."""
    line = next(it for it in Path("/proc/self/status").read_text().splitlines() if it.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Makes the model, measures each row and prints the table."""
    if len(sys.argv) > 2:
        name, *rest = sys.argv[1:]
        folder, layers = Path(rest[0]), int(rest[1])
        if name == "make":
            make(folder, layers)
        elif name == "load":
            print(json.dumps(load(folder, layers, *rest[2:])))
        else:
            print(json.dumps(export(folder, Path(rest[2]), *rest[3:])))
        return
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    layers = max(1, round((gigabytes * 5e8 - TABLES) / LAYER))
    size = 2 * (layers * LAYER + TABLES)
    with tempfile.TemporaryDirectory() as temporary:
        hf, params, maxtext = (Path(temporary) / name for name in ("hf", "params", "maxtext"))
        measure("make", hf, layers)
        rows = {
            "load Hugging Face, bfloat16": measure("load", hf, layers, "bfloat16"),
            "load Hugging Face as float32": measure("load", hf, layers, "float32"),
            "export Hugging Face -> params": measure("export", hf, layers, params, "format=params"),
            "load params, bfloat16": measure("load", params, layers, "bfloat16"),
            "load Hugging Face as float32, 8 devices": measure("load", hf, layers, "float32", *EIGHT),
            "load params, bfloat16, 8 devices": measure("load", params, layers, "bfloat16", *EIGHT),
            "export params -> Hugging Face": measure("export", params, layers, Path(temporary) / "back", "format=hf"),
            "export Hugging Face -> Hugging Face": measure("export", hf, layers, Path(temporary) / "copy", "format=hf"),
            "export Hugging Face -> MaxText": measure("export", hf, layers, maxtext, "format=maxtext"),
            "load MaxText, bfloat16, 8 devices": measure("load", maxtext, layers, "bfloat16", *EIGHT),
        }
    layer = 2 * WIDTH * MLP
    print(
        f"{layers} layers, {size / 1e9:.2f} GB in bfloat16; the largest stacked parameter: {layers * layer / 1e6:.0f} "
        f"MB, a layer of it: {layer / 1e6:.0f} MB, the table: {2 * VOCAB * WIDTH / 1e6:.0f} MB\n"
    )
    print("| | seconds | MB/s | memory above the model, MB |\n|---|---|---|---|")
    for label, row in rows.items():
        print(f"| {label} | {row['seconds']:.1f} | {size / 1e6 / row['seconds']:.0f} | {row['memory'] / 1e6:.0f} |")


def measure(name: str, *arguments: object) -> dict[str, float]:
    """Measures one row in a new process, which prints the result as its last line."""
    command = [sys.executable, __file__, name, *map(str, arguments)]
    flags = "--xla_force_host_platform_device_count=8" if EIGHT[0] in arguments else ""
    environment = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1]) if name != "make" else {}


if __name__ == "__main__":
    main()
