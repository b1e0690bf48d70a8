"""Measures context parallelism: the tables of docs/benchmarks/context.md.

    python scripts/benchmark_context.py --out context.jsonl [--maxtext DIR] [--only NAME]
    python scripts/benchmark_context.py --table context.jsonl
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python scripts/benchmark_context.py --memory --sent --steps 4
    python scripts/benchmark_context.py --work

The first command compiles the cases for TPUs, one at a time, and appends their figures to the file; a case that the
file already contains is not measured again. With --maxtext, MaxText's steps are measured, too, and the libtpu in DIR
compiles both programs; benchmark_memory.py describes DIR. The second command prints the file's figures as a table. The
third command compiles for this machine's CPU devices, and times steps on them. The last command only counts the tiles
of attention scores that each device computes.
"""

import functools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmark_memory import ROOT, maxtext, options, read, run, write

STRATEGY = "context_parallel_strategy"
BALANCE = "context_parallel_load_balance"
DEVICES, LENGTHS = (1, 2, 4, 8), (8192, 16384, 32768)
DOCUMENTS = (1024, 4096, 16384)  # mean tokens per document
ULYSSES = 2  # devices on the axis context_usp_ulysses with the strategy usp
STRATEGIES = ("all_gather", "ring", "ulysses", "usp")
HEADS, WIDTH = 8, 64  # number and width of the heads, in the single attention layer and in MODEL
MODEL = [
    *("dataset_type=synthetic", "eval_interval=-1", "base_emb_dim=512", "base_mlp_dim=1536", "vocab_size=512"),
    *(f"base_num_query_heads={HEADS}", f"base_num_kv_heads={HEADS}", f"head_dim={WIDTH}", "remat_policy=full"),
    *("base_num_decoder_layers=2", "attention=blockwise", "ici_fsdp_parallelism=1"),
]
TPU = [
    *("model_name=llama2-7b", "dataset_type=synthetic", "packing=false", "compile_topology=v5e-16"),
    *("compile_topology_num_slices=1", "ici_context_parallelism=4", "ici_fsdp_parallelism=4"),
    *("per_device_batch_size=0.25", "max_target_length=32768", "remat_policy=full", "attention=flash"),
]
TOKAMAX = ["use_tokamax_splash=true", "use_jax_splash=false"]  # required by MaxText's ring strategies
# Maps the name of a case to the settings of both programs, and to MaxText's additional settings (None: MaxText's step
# is not compiled).
CASES: dict[str, tuple[list[str], list[str] | None]] = {
    "all_gather": ([f"{STRATEGY}=all_gather"], []),
    "ring": ([f"{STRATEGY}=ring"], TOKAMAX),
    "ulysses": ([f"{STRATEGY}=ulysses"], None),  # MaxText's step does not fit into memory
    "usp, 2 x 2": (
        [
            *(f"{STRATEGY}=usp", "ici_context_parallelism=2", "ici_context_usp_ulysses_parallelism=2"),
            "allow_split_physical_axes=true",
        ],
        TOKAMAX,
    ),
    "all_gather, blockwise": ([f"{STRATEGY}=all_gather", "attention=blockwise"], None),
}


def trainer(settings: list[str]) -> dict[str, Any]:
    """Returns the figures of this project's step."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "trainer.train_compile", "base.yml", f"compile_report_file={file}"]
        dump = ["dump_hlo=true", f"dump_hlo_local_dir={folder}/hlo"]
        run([*command, *dump, *TPU, *settings], ROOT, {"PYTHONPATH": str(ROOT / "src")})
        report = json.loads(file.read_text())
        text = max(Path(folder, "hlo").glob("*step*after_optimizations.txt")).read_text()
    names = ("temp_bytes", "argument_bytes", "flops", "compile_seconds", "collectives")
    return {name: report[name] for name in names} | {
        "serial_seconds": report["estimate"]["serial_seconds"],
        "permutes": list(permutes(text)),
    }


def permutes(text: str) -> Iterator[dict[str, Any]]:
    """Yields a dict for each collective-permute in the text of a scheduled module: its computation, its bytes, and the
    number of operations of each kind between its start and its end."""
    from trainer.aot.hlo import parse

    for name, computation in parse(text).computations.items():
        sent: dict[str, tuple[int, int]] = {}
        instructions = list(computation)
        for at, instruction in enumerate(instructions):
            if instruction.opcode == "collective-permute-start":
                operands = computation.operands(instruction)
                sent[instruction.name] = at, sum(shape.bytes for each in operands for shape in each.shapes)
            elif instruction.opcode == "collective-permute-done":
                begun, size = sent[computation.operands(instruction)[0].name]
                between = [each.opcode for each in instructions[begun + 1 : at]]
                beside = {opcode: between.count(opcode) for opcode in ("while", "fusion", "custom-call", "conditional")}
                yield {"computation": name, "bytes": size, "beside": {key: n for key, n in beside.items() if n}}


def measure(out: Path, folder: Path | None, only: str) -> None:
    """Measures the cases whose names contain `only` and that `out` lacks, and appends their figures to `out`."""
    commit = run(["git", "describe", "--always", "--dirty"], ROOT, {}).strip()
    if folder:
        os.environ["TPU_LIBRARY_PATH"] = str(next(folder.glob("env/lib/python*/site-packages/libtpu/libtpu.so")))
    have = {(line["program"], line["case"]) for line in read(out)}
    for name, (settings, theirs) in CASES.items():
        if only in name and ("trainer", name) not in have:
            write(out, {"program": "trainer", "case": name, "commit": commit, "figures": trainer(settings)})
        if only in name and folder and theirs is not None and ("maxtext", name) not in have:
            write(out, {"program": "maxtext", "case": name, "figures": maxtext(folder, [*TPU, *settings, *theirs])})


def table(lines: list[dict[str, Any]]) -> None:
    """Prints a row for each case that was compiled for TPUs."""
    theirs = {line["case"]: line["figures"]["temp_bytes"] for line in lines if line["program"] == "maxtext"}
    print("| | arguments, GB | temporaries, GB | MaxText | | sent over context, GB | PFLOP | estimate, s | commit |")
    print("|---|---|---|---|---|---|---|---|---|")
    for line in (line for line in lines if line["program"] == "trainer"):
        it, its = line["figures"], theirs.get(line["case"])
        over = [each for each in it["collectives"] if any(axis.startswith("context") for axis in each["axes"])]
        cells = [
            line["case"],
            f"{it['argument_bytes'] / 1e9:.2f}",
            f"{it['temp_bytes'] / 1e9:.2f}",
            f"{its / 1e9:.2f}" if its else "",
            f"{it['temp_bytes'] / its:.2f}" if its else "",
            f"{sum(each['bytes'] for each in over) / 1e9:.1f}",
            f"{it['flops'] / 1e15:.2f}",
            f"{it['serial_seconds']:.2f}",
            line["commit"],
        ]
        print(f"| {' | '.join(cells)} |")


def sizes(strategy: str, n: int) -> tuple[int, int]:
    """Returns the sizes of the axes context and context_usp_ulysses on `n` devices."""
    return (n // ULYSSES, ULYSSES) if strategy == "usp" and n > 1 else (n, 1)


def layer(strategy: str, n: int, length: int) -> tuple[Any, Any, Any, Any]:
    """Returns an attention layer without projections, a function that also returns the layer's gradients, abstract
    float32 arguments for one row, and a mesh of `n` devices. On a single device, the layer runs the code of ring
    attention."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from trainer.layers.across import Across
    from trainer.layers.attention import Scores
    from trainer.ops.attention import Mask
    from trainer.ops.ring import Ring, ring_attention
    from trainer.products.context import Context
    from trainer.sharding import on_mesh

    split = "activation_length", "activation_q_length", "activation_kv_length"
    whole = "activation_batch", "activation_heads", "activation_kv_heads"
    rules = dict.fromkeys(split, ("context", "ulysses")) | dict.fromkeys(whole, ())
    devices = np.array(jax.devices()[:n]).reshape(sizes(strategy, n))
    mesh = Mesh(devices, ("context", "ulysses"), axis_types=(AxisType.Auto,) * 2)
    scores = Scores("blockwise", across=Across(strategy))

    def forward(query: Any, key: Any, value: Any, position: Any) -> Any:
        mask = Mask(*(position,) * 4)
        if n == 1:
            return ring_attention(query, key, value, mask, ring=Ring())
        with on_mesh(mesh, rules):
            return scores.attend(query, key, value, mask, Context(position, position, jnp.zeros(1, int), None))

    def both(query: Any, key: Any, value: Any, position: Any, grad: Any) -> Any:
        out, pull = jax.vjp(functools.partial(forward, position=position), query, key, value)
        return out, pull(grad)

    shards = NamedSharding(mesh, PartitionSpec(None, ("context", "ulysses")))
    x = jax.ShapeDtypeStruct((1, length, HEADS, WIDTH), jnp.float32, sharding=shards)
    return forward, both, (x, x, x, jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=shards), x), mesh


def built(strategy: str, n: int, length: int, *settings: str) -> Any:
    """Returns a run of MODEL with one row on `n` devices."""
    import jax

    from trainer.config.load import load
    from trainer.training.build import build

    context, ulysses = sizes(strategy, n)
    mesh = [f"ici_context_parallelism={context}", f"ici_context_usp_ulysses_parallelism={ulysses}"]
    own = [f"{STRATEGY}={strategy}", *mesh] if n > 1 else []
    rows = [f"max_target_length={length}", f"per_device_batch_size={1 / n}"]
    return build(load(["base.yml", *MODEL, *rows, *own, *settings]).config, jax.devices()[:n])


def fits(strategy: str, n: int) -> bool:
    """Returns whether a strategy supports `n` devices."""
    return n == 1 or strategy != "usp" or n >= 2 * ULYSSES


def memory() -> None:
    """Prints the temporaries of a layer and of a step by strategy, length and number of devices. The column `n x` is
    the total over all devices, divided by the same total for the smallest number of devices above one that the strategy
    supports."""

    def of_layer(strategy: str, n: int, length: int) -> int:
        _, both, given, _ = layer(strategy, n, length)
        import jax

        return jax.jit(both).lower(*given).compile().memory_analysis().temp_size_in_bytes

    def of_step(strategy: str, n: int, length: int) -> int:
        return built(strategy, n, length).compile().memory_analysis().temp_size_in_bytes

    print(f"| | strategy | tokens | {' | '.join(f'{n}, MB | n x' for n in DEVICES)} |")
    print(f"|---|---|---|{'---|---|' * len(DEVICES)}")
    for what, measured in (("layer", of_layer), ("step", of_step)):
        for strategy in STRATEGIES:
            for length in LENGTHS:
                found = {n: measured(strategy, n, length) for n in DEVICES if fits(strategy, n)}
                first = next(n for n in found if n > 1)
                cells = (
                    f"{found[n] / 1e6:.1f} | {n * found[n] / (first * found[first]):.2f}" if n in found else " | "
                    for n in DEVICES
                )
                print(f"| {what} | {strategy} | {length} | {' | '.join(cells)} |", flush=True)


def sent() -> None:
    """Prints the bytes that a device sends in the forward pass of a layer, and the bytes that a formula predicts."""
    import jax

    from trainer.aot.cost import analyze

    length = LENGTHS[0]
    whole, words = length * HEADS * WIDTH, 4
    print("| strategy | devices | queries, keys, values, bytes | formula | positions and segments, bytes |")
    print("|---|---|---|---|---|")
    for strategy in STRATEGIES:
        for n in (n for n in DEVICES if n > 1 and fits(strategy, n)):
            forward, _, given, mesh = layer(strategy, n, length)
            text = jax.jit(forward).lower(*given[:4]).compile().as_text() or ""
            found = analyze(text, mesh).collectives
            floats, others = (sum(c.bytes for c in found if (c.dtype == "f32") is kind) for kind in (True, False))
            ring, heads = sizes(strategy, n) if strategy == "usp" else (n, n)
            by_ring, by_heads = 2 * (ring - 1) / n * whole, 4 * (heads - 1) / heads / n * whole
            parts = {"ulysses": by_heads, "usp": by_heads + by_ring}
            formula = words * parts.get(strategy, by_ring)
            print(f"| {strategy} | {n} | {floats:,.0f} | {formula:,.0f} | {others:,.0f} |", flush=True)


def work(rows: int = 16) -> None:
    """Prints how many tiles of attention scores the devices compute if they skip the tiles that `trainer.ops.ring`
    skips: for rows with one document, and for packed rows by mean document length.

    Counts are relative to all tiles of a device's queries, and averaged over rows. The column "computed" has the mean
    over devices. "slowest" has the maximum over devices, which determines the time of all_gather. "in rounds" has the
    sum over rounds of each round's maximum, which determines the time of a ring. "slowest" and "in rounds" are each
    followed by the ratio to the mean over devices. The two columns under "worst row" have the largest value of each
    ratio in any row.
    """
    import numpy as np

    from trainer.ops.order import order
    from trainer.ops.ring import BLOCK

    rng = np.random.default_rng(0)
    print("| tokens | tokens of a document | devices | order | computed | slowest | | in rounds | | worst row | |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for length, mean in ((length, mean) for length in LENGTHS for mean in (0, *DOCUMENTS)):
        drawn = [documents(rng, length, mean) for _ in range(rows if mean else 1)]
        for n, name in ((n, name) for n in DEVICES[1:] for name in ("none", "dual_chunk_swap", "striped")):
            at = np.arange(length) if name == "none" else order(length, n, name)
            counts = np.array([tiles(at, segment[at], n, BLOCK) for segment in drawn]) * n / (length // BLOCK) ** 2
            each = counts.sum(2).mean(1)
            most, rounds = counts.sum(2).max(1), np.array([in_rounds(count).max(0).sum() for count in counts])
            cells = (f"{x.mean():.1%} | {x.mean() / each.mean():.2f}" for x in (most, rounds))
            worst = f"{(most / each).max():.2f} | {(rounds / each).max():.2f}"
            what = f"{length} | {mean or length} | {n} | {name}"
            print(f"| {what} | {each.mean():.1%} | {' | '.join(cells)} | {worst} |", flush=True)


def documents(rng: Any, length: int, mean: int) -> Any:
    """Returns the document index of each token of a row, [length]. Document lengths are log-normal with sigma 1 and a
    mean of `mean` tokens; if `mean` is 0, the row is one document."""
    import numpy as np

    if not mean:
        return np.zeros(length, int)
    sizes = rng.lognormal(math.log(mean) - 0.5, 1, 8 * length // mean + 64).astype(int) + 1
    return np.repeat(np.arange(len(sizes)), sizes)[:length]


def tiles(at: Any, segment: Any, n: int, block: int) -> Any:
    """Returns how many tiles of scores each device computes with the keys of each device: [device of the queries,
    device of the keys]. `at` is each token's index in the original order. A tile is computed if it contains a query and
    a key of the same document, and the document's last query in the tile does not precede the document's first key in
    the tile."""
    import numpy as np

    blocks = len(at) // block
    of_block = np.arange(len(at)) // block
    last = np.full((blocks, segment.max() + 1), -1)
    first = np.full_like(last, len(at))
    np.maximum.at(last, (of_block, segment), at)
    np.minimum.at(first, (of_block, segment), at)
    seen = (last[:, None] >= first).any(-1)
    return seen.reshape(n, blocks // n, n, blocks // n).sum((1, 3))


def in_rounds(counts: Any) -> Any:
    """Returns `counts` [device, source device], rearranged to [device, round]."""
    import numpy as np

    device = np.arange(len(counts))[:, None]
    return counts[device, (device - np.arange(len(counts))) % len(counts)]


def times(steps: int, length: int) -> None:
    """Prints the CPU seconds of a step of MODEL by strategy. The strategies are timed in turns."""
    import jax
    from benchmark_default import batch_of

    ways = {"1 device": ("ring", 1, []), "1 device, dot_product": ("ring", 1, ["attention=dot_product"])}
    for strategy in STRATEGIES:
        for n in (n for n in (4, 8) if fits(strategy, n)):
            ways[f"{strategy}, {n} devices"] = strategy, n, []
    ways["ring, 8 devices, in order"] = "ring", 8, [f"{BALANCE}=false"]
    programs = {}
    for name, (strategy, n, settings) in ways.items():
        it = built(strategy, n, length, *settings)
        programs[name] = it.compile(), it.init(), batch_of(it)
    least = dict.fromkeys(ways, math.inf)
    for _ in range(steps):
        for name, (step, state, batch) in programs.items():
            begun = time.process_time()
            state, _ = jax.block_until_ready(step(state, batch, ()))
            least[name] = min(least[name], time.process_time() - begun)
            programs[name] = step, state, batch
    print(f"| {length} tokens | CPU s of a step, least of {steps} | against 1 device |\n|---|---|---|")
    for name, seconds in least.items():
        print(f"| {name} | {seconds:.2f} | {seconds / least['1 device']:.2f} |")


def main() -> None:
    """Measures, or prints the table of the measurements."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, help="time this many steps on this machine's CPU")
    parser.add_argument(
        "--memory", action="store_true", help="print the temporaries of programs for this machine's CPU"
    )
    parser.add_argument("--sent", action="store_true", help="print the bytes that a device sends in a layer")
    parser.add_argument("--work", action="store_true", help="print the tiles of scores that devices compute")
    parser.add_argument("--length", type=int, default=4096, help="tokens per row with --steps")
    given = parser.parse_args()
    if given.out:
        measure(given.out, given.maxtext, given.only)
    if given.table or given.out:
        table(read(given.table or given.out))
    if given.memory:
        memory()
    if given.sent:
        sent()
    if given.work:
        work()
    if given.steps:
        times(given.steps, given.length)


if __name__ == "__main__":
    main()
