"""Checks this project on an accelerator, in one process and without a network, and prints a Markdown table.

    python scripts/check_accelerator.py            # on a GPU or a TPU; takes less than ten minutes
    python scripts/check_accelerator.py --small    # tiny sizes on any platform, to test the script
    python scripts/check_accelerator.py --only attention    # only the checks whose names contain this word

- Attention ops, in each variant that they support, and grouped products: results and gradients are compared with those
  of a plain implementation in float32. Differences are relative to the largest entry of the reference array.
- The five combinations of enable_nnx, pure_nnx_decoder and pure_nnx: losses, parameters and optimizer state are
  bit-identical after a few steps. The first combination runs twice, to show whether the devices are deterministic.
- A checkpoint that is restored on a CPU, saved there, and restored on the accelerator again: all bits are identical,
  and the loss of the next step is nearly the same on both.
- A training step of a model with 1.1 B parameters: its MFU, and its time, which must not be below the lower bound that
  `trainer.aot` estimates.
- Tokens/s of decode steps with every slot in use.

MFU follows the convention of models/flops.py (6 operations per token for each parameter of a matrix product, half of
the full score matrix for causal attention, nothing for rematerialization), relative to the published dense bfloat16
peak. The step's rate is also reported relative to that of a large product, which needs no published figure. The product
and the steps run in turns, so that they run at the same clock rates.

Exit code: 0, 1 if something failed, 2 without an accelerator.
"""

# ruff: noqa: E402

import argparse
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.runtime.platforms import leave_out_absent_tpu

leave_out_absent_tpu()  # must run before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
from accelerator_kernels import PLAIN, ROUNDS, Checks, Failed, LeftOut, Sizes, expect, kernels, seconds

from trainer.aot.chips import chip_of
from trainer.aot.compilation import compile_step
from trainer.backends.registry import MODELS
from trainer.checkpoint.manager import CheckpointManager, inspect, restore
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.flags import flags_of
from trainer.config.load import load
from trainer.data.batches import train_batch
from trainer.data.synthetic import SyntheticRows
from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling
from trainer.ops.paths import by_name
from trainer.sharding import slice_count
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.run import Run

STEPS = 5  # training steps of each combination
FIXED = ["dataset_type=synthetic", "eval_interval=-1", "steps=1000", "attention=flash", "opt_type=adamw"]


LARGE = (
    "decoder_block=llama2 base_emb_dim=2048 base_num_decoder_layers=16 base_num_query_heads=16 base_num_kv_heads=8 "
    "head_dim=128 base_mlp_dim=8192 vocab_size=32768 dtype=bfloat16"
)
MEDIUM = f"{LARGE} base_emb_dim=512 base_num_decoder_layers=4 base_num_query_heads=4 base_num_kv_heads=2"
TINY = (
    "decoder_block=llama2 base_emb_dim=32 base_num_decoder_layers=1 base_num_query_heads=4 base_num_kv_heads=2 "
    "head_dim=8 base_mlp_dim=64 vocab_size=64 dtype=float32 per_device_batch_size=2"
)
ACCELERATOR = Sizes(
    dtype="bfloat16",
    tolerance=0.02,  # bfloat16 has 8 significant bits
    attention=(2, 2048, 16, 8, 128),
    window=256,
    grouped=(8192, 8, 1024, 2048),
    matrix=(8192, 20),
    steps=10,
    states=f"{MEDIUM} max_target_length=1024 per_device_batch_size=2",
    model=f"{LARGE} max_target_length=4096 per_device_batch_size=4 remat_policy=full",
    decoding=f"{LARGE} max_target_length=1024 per_device_batch_size=8 weight_dtype=bfloat16",
)
SMALL = Sizes(
    dtype="float32",
    tolerance=1e-4,  # ops add float32 numbers in different orders
    attention=(1, 384, 2, 1, 16),  # more tokens than a block of the op blockwise
    window=16,
    grouped=(64, 4, 16, 32),
    matrix=(128, 4),
    steps=2,
    states=f"{TINY} max_target_length=32",
    model=f"{TINY} max_target_length=64 remat_policy=full",
    decoding=f"{TINY} max_target_length=64",
)


def config_of(keys: str, name: str = next(iter(MODELS))) -> Any:
    """Returns the configuration with `keys` for the combination `name`."""
    return load([*FIXED, *keys.split(), *(f"{key}={value}" for key, value in flags_of(name).items())]).config


def batch_of(run: Run, step: int) -> Any:
    """Returns the batch of a step on the devices of `run`."""
    length, together = run.config.max_target_length, run.config.packing
    source = SyntheticRows(length, run.config.vocab_size, seed=0, together=together)
    batch = train_batch(source, step * run.rows, run.rows, seed=0, shuffle=False)
    return placed(run, batch, run.rows)


def trained(run: Run, step: Any) -> tuple[Any, dict[str, bytes]]:
    """Runs a compiled step STEPS times. Returns the canonical train state, and a dict from the name of each leaf of the
    state and of each step's metrics to the leaf's bytes."""
    leaves, bits = jax.tree.leaves(run.init()), {}
    for i in range(STEPS):
        leaves, metrics = step(leaves, batch_of(run, i), run.frozen.make())
        bits |= {f"{name} of step {i}": leaf for name, leaf in bits_of(metrics).items()}
    tree = run.codec.unpack(jax.tree.unflatten(jax.tree.structure(run.abstract_state), leaves))
    return tree, bits | bits_of(tree)


def bits_of(tree: Any) -> dict[str, bytes]:
    """Returns a dict from the path of each leaf to the leaf's bytes."""
    return {name: np.asarray(leaf).tobytes() for name, leaf in by_name(tree).items()}


def same(found: dict[str, bytes], right: dict[str, bytes]) -> str:
    """Returns the number of equal arrays, in words. If the bits of any array differ, raises Failed with the name of the
    first such array."""
    if differing := [name for name in {**right, **found} if found.get(name) != right.get(name)]:
        raise Failed(f"{len(differing)} of {len(right)} arrays differ, the first is {differing[0]}")
    return f"equal bits in {len(right)} arrays"


def states(sizes: Sizes, devices: Sequence[jax.Device]) -> Checks:
    """Yields the checks of the combinations of flags, and the check of a checkpoint that goes to a CPU and back."""
    first, *others = MODELS

    @functools.cache
    def base() -> tuple[Run, Any, Any, dict[str, bytes]]:
        """Returns the first combination's run, its compiled step, and the results of `trained`."""
        run = build(config_of(sizes.states), devices)
        step = run.compile_on_leaves()
        return run, step, *trained(run, step)

    def again() -> str:
        run, step, _, bits = base()
        return same(trained(run, step)[1], bits)

    def combination(name: str) -> str:
        run = build(config_of(sizes.states, name), devices)
        return same(trained(run, run.compile_on_leaves())[1], base()[-1])

    def there_and_back() -> str:
        run, step, tree, _ = base()
        elsewhere = build(config_of(f"{sizes.states} attention={PLAIN}"), jax.local_devices(backend="cpu")[-1:])
        with tempfile.TemporaryDirectory() as folder:
            on_cpu = passed(run, tree, elsewhere, Path(folder) / "there")
            back = passed(elsewhere, on_cpu, run, Path(folder) / "back")
        same(bits_of(on_cpu), bits_of(tree))
        figure = same(bits_of(back), bits_of(tree))
        ours, its = next_loss(run, step, back), next_loss(elsewhere, elsewhere.compile_on_leaves(), on_cpu)
        return expect(abs(ours - its) < 0.01 * its, f"{figure}; the next loss is {ours:.5f}, on the CPU {its:.5f}")

    yield f"{first} twice, {STEPS} steps", again
    for name in others:
        yield f"{name} beside {first}", functools.partial(combination, name)
    yield "a checkpoint to a CPU and back", there_and_back


def passed(run: Run, tree: Any, other: Run, folder: Path) -> Any:
    """Saves the train state `tree` of `run` in `folder`, restores it on the devices of `other`, and returns the
    restored state."""
    with CheckpointManager(folder, run.config, print) as manager:
        manager.save(STEPS, tree, Sidecar("", 0, "", {}), {})
    inspect(manager.path(STEPS))
    return restore(manager.path(STEPS), other.states.one)


def next_loss(run: Run, step: Any, tree: Any) -> float:
    """Returns the loss of one more step from the canonical train state `tree`, which is donated."""
    return float(step(jax.tree.leaves(run.codec.pack(tree)), batch_of(run, STEPS), run.frozen.make())[1]["loss"])


def speed(sizes: Sizes, devices: Sequence[jax.Device]) -> Checks:
    """Yields two checks of a training step: its MFU, and its time compared with the estimate."""

    @functools.cache
    def measured() -> tuple[Run, float, float]:
        """Returns the run, the seconds of its step, and the FLOP/s of a large matrix product."""
        run = build(config_of(sizes.model), devices)
        step, leaves, batch = run.compile_on_leaves(), jax.tree.leaves(run.init()), batch_of(run, 0)
        product, times, rates = product_rate(sizes), [], []
        for _ in range(ROUNDS + 1):
            started = time.perf_counter()
            for _ in range(sizes.steps):
                leaves, metrics = step(leaves, batch, ())
            jax.block_until_ready((leaves, metrics))
            times.append((time.perf_counter() - started) / sizes.steps)
            rates.append(product())
        return run, statistics.median(times[1:]), statistics.median(rates[1:])  # the first round warms up

    def mfu() -> str:
        run, step, product = measured()
        tokens = run.rows * run.config.max_target_length / step
        flops, peak = tokens * run.flops_per_token / len(devices), peak_of(devices[0].device_kind)
        share = f"MFU {flops / peak:.1%} of {peak / 1e12:.0f}" if peak else "no published peak in the tables"
        return (
            f"{share}; {run.parameters / 1e9:.2f} B parameters, {1e3 * step:.1f} ms, {tokens:,.0f} tokens/s, "
            f"{flops / 1e12:.3f} TFLOP/s per device; {flops / product:.1%} of a product's {product / 1e12:.3f}"
        )

    def estimated() -> str:
        run, step, _ = measured()
        state, *others = run.abstract_args()
        _, report = compile_step(
            run, lambda: run.step_on_leaves.lower(jax.tree.leaves(state), *others), slice_count(devices) or 1
        )
        expect(not report.cost.unknown_loops, f"unknown trip counts: {', '.join(report.cost.unknown_loops)}")
        if report.estimate is None:
            others = ", without those of kernels that are not counted" if report.cost.notes else ""  # such as cuBLAS
            counted = f"{report.cost.flops / 1e12:.4g} TFLOP{others}"
            raise LeftOut(f"{devices[0].device_kind} is not in aot/chips.py; {counted}")
        least, most = report.estimate.seconds, report.estimate.serial_seconds
        figure = f"{1e3 * step:.1f} ms; estimated {1e3 * least:.1f} at least, {1e3 * most:.1f} without overlap"
        return expect(step >= least, figure)

    yield "a training step", mfu
    yield "its time beside the estimate", estimated


def peak_of(kind: str) -> float | None:
    """Returns the published peak FLOP/s of dense bfloat16 products on a device kind; None if trainer.aot.chips lacks
    the kind."""
    chip = chip_of(kind)
    return chip.flops("bf16") if chip else None


def product_rate(sizes: Sizes) -> Callable[[], float]:
    """Returns a function that measures the FLOP/s of a chain of matrix products on the first device."""
    side, chain = sizes.matrix
    ones = jnp.full((side, side), 1 / side, sizes.dtype)
    run = jax.jit(lambda x: jax.lax.fori_loop(0, chain, lambda _, y: y @ ones, x))
    seconds(run, ones)
    return lambda: 2 * side**3 * chain / seconds(run, ones)


def decoding(sizes: Sizes, devices: Sequence[jax.Device]) -> str:
    """Measures decode steps. Every slot continues the same prompt greedily, so all must return the same tokens."""
    engine = MaxEngine(config_of(sizes.decoding), devices)
    params, slots = engine.load_params(say=lambda line: None), engine.max_concurrent_decodes
    prefix, _ = engine.prefill(params, engine.padded([1, 2, 3]), 3, sampling=Sampling(0.0))
    state, speeds, same = engine.init_decode_state(), [], True
    for slot in range(slots):
        state = engine.insert(prefix, state, slot)
    for _ in range(ROUNDS + 1):
        started, results = time.perf_counter(), []
        for _ in range(sizes.steps):
            state, result = engine.generate(params, state)
            results.append(result.tokens)
        jax.block_until_ready(results)
        speeds.append(slots * sizes.steps / (time.perf_counter() - started))
        same = same and all(len(set(np.asarray(tokens).tolist())) == 1 for tokens in results)
    figure = f"{statistics.median(speeds[1:]):,.0f} tokens/s in {slots} slots"
    return expect(same, f"{figure}{'' if same else '; slots with the same prompt differ'}")


def commit() -> str:
    """Returns the commit of this checkout, or "unknown"."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main(argv: Sequence[str] | None = None, devices: Sequence[jax.Device] | None = None) -> int:
    """Prints the table and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="use tiny sizes, on any platform")
    parser.add_argument("--only", default="", metavar="WORD", help="only checks with this in their names")
    given = parser.parse_args(argv)
    sizes = SMALL if given.small else ACCELERATOR
    devices, started = devices or jax.devices(), time.perf_counter()
    kind, platform = devices[0].device_kind, devices[0].platform
    if sizes is ACCELERATOR and platform == "cpu":
        print("error: there is no accelerator; use --small to test the script on a CPU", file=sys.stderr)
        return 2
    print(f"{len(devices)} x {kind} ({platform}), JAX {jax.__version__}, commit {commit()}, ", end="")
    print(f"{time.strftime('%Y-%m-%d')}{', tiny sizes' if sizes is SMALL else ''}\n")
    print("| what | result | figure |\n|---|---|---|", flush=True)
    failed = []
    parts = kernels(sizes, platform), states(sizes, devices), speed(sizes, devices)
    last = ("decode steps", lambda: decoding(sizes, devices))
    for what, check in (check for part in (*parts, [last]) for check in part if given.only in check[0]):
        try:
            result, figure = "ok", check()
        except LeftOut as why:
            result, figure = "left out", str(why)
        except Exception as error:  # any error: a check that fails must not prevent the others
            result, figure = "FAILED", str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
            if "RESOURCE_EXHAUSTED" in figure:
                result, figure = "left out", "does not fit into the memory"
            else:
                failed.append(what)
        print(f"| {what} | {result} | {' '.join(figure.split())[:300].replace('|', '/')} |", flush=True)
    print(f"\n{time.perf_counter() - started:.0f} s; failed: {'; '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
