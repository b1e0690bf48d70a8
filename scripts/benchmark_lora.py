"""Compiles steps with and without adapters ahead of time, and prints memory, FLOPs and bytes per device as tables.

    python scripts/benchmark_lora.py [MODEL [TOPOLOGY]] [key=value ...]

The first table is about training steps, the second about decode steps with several adapters on one base model. Nothing
runs on a TPU.
"""

import functools
import sys
from typing import Any

import numpy as np

from trainer.config.load import load
from trainer.runtime.platforms import prepare_to_compile

RANK = 16
LORA = ["enable_lora=true", f"lora_rank={RANK}", "lora_alpha=32"]
HALF = "weight_dtype=bfloat16"
TRAINING = {
    "full, float32": [],
    "LoRA, float32": LORA,
    "full, bfloat16": [HALF],
    "LoRA, bfloat16": [*LORA, HALF],
    "QLoRA, int8": [*LORA, HALF, "lora_weight_qtype=int8", "lora_tile_size=64"],
    "QLoRA, nf4": [*LORA, HALF, "lora_weight_qtype=nf4", "lora_tile_size=64"],
}
ADAPTERS = (0, 1, 2, 4)
DECODING = ["ici_fsdp_parallelism=1", "ici_tensor_parallelism=-1", HALF, "enable_checkpointing=false"]
GIB = 2**30


def main() -> None:
    """Runs the command line."""
    words = sys.argv[1:]
    names = [word for word in words if "=" not in word]
    model, topology = [*names, *("llama3.1-8b", "v5e-8")[len(names) :]]
    keys = [f"model_name={model}", f"compile_topology={topology}", "dataset_type=synthetic", "max_target_length=2048"]
    keys += ["per_device_batch_size=1", *(word for word in words if "=" in word)]
    prepare_to_compile(topology)
    from trainer.aot.compilation import compile_step
    from trainer.aot.topologies import devices_of, topology_of
    from trainer.backends.registry import make_model
    from trainer.checkpoint.base import without_base
    from trainer.config.resolve import resolve
    from trainer.inference.engine import Engine
    from trainer.inference.served import serve
    from trainer.training.build import build

    adapted = {"enable_lora": True, "lora_alpha": 1.0}
    devices = devices_of(topology_of(load(["base.yml", *keys]).config), 1)
    _row("training step", "arguments", "temporaries", "checkpoint", "TFLOP", "GB accessed", "lower bound")
    for name, own in TRAINING.items():
        run = build(load(["base.yml", *keys, *own]).config, devices)
        _, report = compile_step(run, functools.partial(run.step.lower, *run.abstract_args()), 1)
        saved = without_base(run.codec.unpack(run.abstract_state), run.base_names)
        _report(name, report, _bytes(saved))
    _row("decode step", "arguments", "temporaries", "adapters", "TFLOP", "GB accessed", "lower bound")
    for count in ADAPTERS:
        served = serve(load(["base.yml", *keys, *DECODING]).config, devices)
        if count:
            values = dict(served.config.items()) | adapted | {"lora_rank": count * RANK}
            config = resolve(values, device_count=len(devices), platform="tpu")
            ranks = np.arange(count + 1)[:, None] == np.repeat(np.arange(1, count + 1), RANK)
            served = served._replace(config=config, model=make_model(config), ranks=ranks if count > 1 else None)
        _, report = Engine(served).aot_compile()
        params, _ = served.abstract_variables
        _report(f"{count} adapters", report, _bytes(_adapters(params)))


def _adapters(params: dict) -> dict:
    from trainer.config.capabilities.lora_keys import ADAPTER
    from trainer.ops.paths import by_name

    return {name: leaf for name, leaf in by_name(params).items() if ADAPTER.search(name)}


def _bytes(tree: object) -> int:
    import jax

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _report(name: str, report: Any, size: int) -> None:
    memory, cost = report.memory, report.cost
    _row(
        name,
        f"{memory.arguments / GIB:.2f} GiB",
        f"{memory.temporaries / GIB:.2f} GiB",
        f"{size / 1e9:.3f} GB",
        f"{cost.flops / 1e12:.1f}",
        f"{cost.hbm_bytes / 1e9:.1f}",
        f"{1000 * report.estimate.seconds:.0f} ms" if report.estimate else "",
    )


def _row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
