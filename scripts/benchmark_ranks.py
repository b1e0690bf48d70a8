"""Compares the order of estimated step times with the order of measured ones: `python scripts/benchmark_ranks.py`.

`trainer.plan` ranks configurations by their estimated time per token. This script measures the steps of 20
configurations of one model (rows, rematerialization, vocabulary tiles, on accelerators also host offload) on one
device, in alternating rounds, and prints Kendall's tau between the measured time per token and the estimate, and also
between the measured time and FLOPs and bytes alone. 1 is the same order, 0 is no relation. On a CPU the estimate uses
this machine's measured peak rates (scripts/benchmark_estimate.py).
"""

import itertools
import os
import statistics
import time
from typing import Any, NamedTuple

if "JAX_PLATFORMS" not in os.environ:
    from trainer.runtime.platforms import leave_out_absent_tpu

    leave_out_absent_tpu()

import jax
from check_accelerator import FIXED, LARGE
from scipy.stats import kendalltau

from trainer.aot.chips import chip_of
from trainer.aot.cost import Cost, analyze
from trainer.aot.roofline import estimate
from trainer.config.load import load
from trainer.data.batches import train_batch
from trainer.data.synthetic import SyntheticRows
from trainer.training.batches import placed
from trainer.training.build import build

ROUNDS = 5
POLICIES = ("none", "minimal", "save_dot_except_mlp", "full")
SMALL = (
    "decoder_block=llama2 base_emb_dim=256 base_num_decoder_layers=6 base_num_query_heads=4 base_num_kv_heads=4 "
    "head_dim=64 base_mlp_dim=768 vocab_size=8192 dtype=float32 max_target_length=128 attention=dot_product"
)
OFFLOAD = "optimizer_memory_host_offload=true"


class Measured(NamedTuple):
    """A configuration: its settings, the cost of its step, the tokens of a step, and the seconds of each round."""

    settings: str
    cost: Cost
    tokens: int
    seconds: list[float]


def main() -> None:
    """Measures, and prints a table and the three correlations."""
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    model = SMALL if on_cpu else f"{LARGE} max_target_length=4096"
    runs = [prepared(model, settings) for settings in configurations(on_cpu)]
    chip = machine = None
    if on_cpu:
        from benchmark_estimate import Machine

        machine = Machine()
    for _ in range(ROUNDS):
        for step, measured in runs:
            if machine:
                machine.measure()
            began = time.perf_counter()
            step()
            measured.seconds.append(time.perf_counter() - began)
    chip = machine.chip(1) if machine else chip_of(device.device_kind)
    assert chip is not None, f"the speed of {device.device_kind} is unknown"
    rows = [row for _, row in runs]
    times = [statistics.median(row.seconds[1:]) / row.tokens for row in rows]
    guesses = [estimate(row.cost, chip, 1).scheduled_seconds / row.tokens for row in rows]
    print(f"{device.device_kind}, JAX {jax.__version__}, load {os.getloadavg()[1]:.1f}\n")
    print("| settings | measured, us per token | estimate | MFLOP per token | MB per token |\n|---|---|---|---|---|")
    for taken, guess, row in sorted(zip(times, guesses, rows, strict=True), key=lambda three: three[0]):
        figures = f"{row.cost.flops / row.tokens / 1e6:.1f} | {row.cost.hbm_bytes / row.tokens / 1e6:.2f}"
        print(f"| {row.settings} | {1e6 * taken:.1f} | {1e6 * guess:.1f} | {figures} |")
    numbers = {
        "the estimate": guesses,
        "FLOPs": [row.cost.flops / row.tokens for row in rows],
        "bytes": [row.cost.hbm_bytes / row.tokens for row in rows],
    }
    for name, values in numbers.items():
        print(f"\nKendall's tau of the measured time and {name}: {kendalltau(times, values).statistic:.2f}", end="")
    print()


def configurations(on_cpu: bool) -> list[str]:
    """Returns 20 settings."""
    rows, tiles = ((2, 4, 8) if on_cpu else (1, 2, 4)), (1, -1)
    settings = [
        f"per_device_batch_size={count} remat_policy={policy} num_vocab_tiling={tile}"
        for count, policy, tile in itertools.product(rows, POLICIES, tiles)
        if tile == 1 or count == rows[1] or (count == rows[2] and on_cpu)
    ]
    return settings if on_cpu else [*settings, *(f"{words} {OFFLOAD}" for words in settings[:4])]


def prepared(model: str, settings: str) -> tuple[Any, Measured]:
    """Returns a function that runs one step of a configuration, and its measurements, which are still empty."""
    words = dict(word.partition("=")[::2] for word in (*FIXED, *model.split(), *settings.split()))
    run = build(load(["base.yml", *(f"{key}={value}" for key, value in words.items())]).config, jax.devices()[:1])
    compiled = run.step.lower(*run.abstract_args()).compile()
    source = SyntheticRows(run.config.max_target_length, run.config.vocab_size, seed=0)
    batch = placed(run, train_batch(source, 0, run.rows, seed=0, shuffle=False), run.rows)
    states = [run.init()]

    def step() -> None:
        states[0], metrics = compiled(states[0], batch, ())
        jax.block_until_ready(metrics)

    step()
    tokens = run.rows * run.config.max_target_length
    return step, Measured(settings, analyze(compiled.as_text(), run.mesh), tokens, [])


if __name__ == "__main__":
    main()
