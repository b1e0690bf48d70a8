"""Measures CPU time of a DiLoCo step between synchronizations, relative to data parallelism in the same process.

python scripts/benchmark_diloco.py
"""

import os

DEVICES = 4
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["NPROC"] = str(4 * DEVICES)  # see docs/decisions/0019-threads.md

import time  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402

from trainer.config.load import load  # noqa: E402
from trainer.data.dataset import open_dataset  # noqa: E402
from trainer.training.batches import LoadedAhead, placed  # noqa: E402
from trainer.training.build import build  # noqa: E402
from trainer.training.start import Start  # noqa: E402

COMMON = (
    "base.yml",
    *("dataset_type=synthetic", "base_num_decoder_layers=4", "per_device_batch_size=2", "ici_fsdp_parallelism=2"),
    *("steps=1000", "enable_checkpointing=false"),
)
ISLANDS = ("enable_diloco=true", "ici_diloco_parallelism=2", "diloco_sync_period=900")
CASES = {
    "data parallelism": ("ici_data_parallelism=2",),
    "DiLoCo": ISLANDS,
    "streaming DiLoCo, 3 fragments": (*ISLANDS, "enable_streaming_diloco=true", "num_diloco_fragments=3"),
}
STEPS, FIRST = 22, 2  # the first steps are not timed


def main() -> None:
    runs = {name: build(load([*COMMON, *words]).config, jax.devices()) for name, words in CASES.items()}
    steps = {name: run.compile() for name, run in runs.items()}
    states = {name: run.init() for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    first = next(iter(runs.values()))
    with LoadedAhead(first, open_dataset(first.config, print), Start([])) as batches:
        for _ in range(STEPS):
            batch, _position = batches.take(lambda: None, lambda: False)
            for name, run in runs.items():  # alternately, so that other load slows all of them
                on_devices = jax.block_until_ready(placed(run, batch, run.rows))
                began = time.process_time()
                states[name], metrics = steps[name](states[name], on_devices, ())
                jax.block_until_ready((states[name], metrics))
                seconds[name].append(time.process_time() - began)
    plain = np.array(seconds["data parallelism"][FIRST:])
    for name, found in seconds.items():
        times = np.array(found[FIRST:])
        print(f"{name:<30} {np.median(times):.3f} s, {np.median(times / plain):.2f} times")


if __name__ == "__main__":
    main()
