"""Measures pipeline parallelism: the tables of docs/benchmarks/pipeline.md.

    python scripts/benchmark_pipeline.py --out pipeline.jsonl [--maxtext DIR] [--only NAME]
    python scripts/benchmark_pipeline.py --table pipeline.jsonl
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python scripts/benchmark_pipeline.py --compile
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python scripts/benchmark_pipeline.py --steps 20

The first command compiles the cases for two slices of TPUs, one at a time, and appends their figures to the file; a
case that the file already contains is not measured again. With --maxtext, MaxText's steps are measured, too, and the
libtpu in DIR compiles both programs; benchmark_memory.py describes DIR. The second command prints the file's figures as
a table. The last two commands time compilation and steps on this machine's CPU.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmark_memory import ROOT, options, read, run, write

MODEL = [
    *("model_name=llama3.1-70b", "dataset_type=synthetic", "compile_topology=v5p-32", "compile_topology_num_slices=2"),
    *("max_target_length=2048", "per_device_batch_size=4", "ici_fsdp_parallelism=16"),
    *("remat_policy=full", "attention=flash"),
]
STAGES = ["dcn_pipeline_parallelism=2", "num_pipeline_microbatches=8"]
FIVE = [*STAGES, "num_layers_per_pipeline_stage=5"]
SIXTEEN = [*STAGES, "base_num_decoder_layers=16", "override_model_config=true"]
ALL = [*STAGES, "num_layers_per_pipeline_stage=40", "scan_layers_per_stage=true"]
OF_LAYERS = ["set_remat_policy_on_pipeline_iterations=false", "set_remat_policy_on_layers_per_stage=true"]
# Maps the name of a case to whether MaxText supports the case, and to the case's settings.
CASES: dict[str, tuple[bool, list[str]]] = {
    "fsdp over both slices": (False, ["dcn_fsdp_parallelism=2"]),
    "data over the slices": (False, ["dcn_data_parallelism=2"]),
    "8 repeats x 5 layers": (True, FIVE),
    "8 repeats x 5 layers, gathered per repeat": (False, [*FIVE, "pipeline_fsdp_ag_per_repeat=true"]),
    "8 repeats x 5 layers, gathered once": (False, [*FIVE, "pipeline_fsdp_ag_once=true"]),
    "1 repeat x 40 layers": (True, [*ALL, *OF_LAYERS]),
    "16 layers, 8 repeats x 1 layer": (True, SIXTEEN),
    "16 layers, 8 repeats x 1 layer, gathered per repeat": (True, [*SIXTEEN, "pipeline_fsdp_ag_per_repeat=true"]),
    "16 layers, 8 repeats x 1 layer, gathered once": (True, [*SIXTEEN, "pipeline_fsdp_ag_once=true"]),
}
TPU = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

# The model that is timed. With this width and these rows, matrix products take most of a step.
TIMED = [
    *("dataset_type=synthetic", "eval_interval=-1", "base_emb_dim=256", "base_mlp_dim=768", "base_num_query_heads=4"),
    *("base_num_kv_heads=4", "head_dim=64", "vocab_size=512", "base_num_decoder_layers=8", "max_target_length=128"),
    *("per_device_batch_size=4", "remat_policy=full", "gradient_clipping_threshold=0", "sharding_tolerance=1"),
]
WAYS = {
    "fsdp": ["ici_fsdp_parallelism=8"],
    "data": ["ici_data_parallelism=8", "ici_fsdp_parallelism=1"],
    **{
        f"{stages} stages, {count} microbatches, {each} per stage": [
            f"ici_pipeline_parallelism={stages}",
            f"ici_data_parallelism={8 // stages}",
            "ici_fsdp_parallelism=1",
            f"num_pipeline_microbatches={count}",
            f"num_layers_per_pipeline_stage={each}",
        ]
        for stages, count, each in ((2, 2, 4), (2, 8, 4), (4, 4, 2), (4, 4, 1), (4, 8, 1), (8, 8, 1))
    },
}


def trainer(settings: list[str], library: Path | None) -> dict[str, Any]:
    """Returns the figures of this project's step."""
    variables = TPU | {"PYTHONPATH": str(ROOT / "src")} | ({"TPU_LIBRARY_PATH": str(library)} if library else {})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "trainer.train_compile", "base.yml", f"compile_report_file={file}"]
        run([*command, *MODEL, *settings], ROOT, variables)
        report = json.loads(file.read_text())
    names = ("temp_bytes", "argument_bytes", "peak_bytes", "flops", "trace_seconds", "compile_seconds", "collectives")
    return {name: report[name] for name in names} | {"serial_seconds": report["estimate"]["serial_seconds"]}


def maxtext(folder: Path, settings: list[str]) -> dict[str, Any]:
    """Returns the bytes of MaxText's step."""
    module = ["-m", "maxtext.trainers.pre_train.train_compile", (folder / "base_yml").read_text().strip()]
    command = [str(folder / "env/bin/python"), *module, "enable_checkpointing=false", "run_name=pipeline"]
    said = run([*command, *MODEL, *settings], folder, TPU)
    begin = said.index("temp_size_in_bytes=") + len("temp_size_in_bytes=")
    return {"temp_bytes": int(said[begin:].split(",")[0])}


def measure(out: Path, folder: Path | None, only: str) -> None:
    """Measures the cases whose names contain `only` and that `out` lacks, and appends their figures to `out`."""
    commit = run(["git", "describe", "--always", "--dirty"], ROOT, {}).strip()
    libraries = list(folder.glob("env/lib/python*/site-packages/libtpu/libtpu.so")) if folder else []
    have = {(line["program"], line["case"]) for line in read(out)}
    for name, (theirs, settings) in CASES.items():
        if only in name and ("trainer", name) not in have:
            figures = trainer(settings, libraries[0] if libraries else None)
            write(out, {"program": "trainer", "case": name, "commit": commit, "figures": figures})
        if only in name and folder and theirs and ("maxtext", name) not in have:
            write(out, {"program": "maxtext", "case": name, "figures": maxtext(folder, settings)})


def table(lines: list[dict[str, Any]]) -> None:
    """Prints a row for each case."""
    theirs = {line["case"]: line["figures"]["temp_bytes"] for line in lines if line["program"] == "maxtext"}
    print(
        "| | arguments, GB | temporaries, GB | MaxText | | sent in groups across slices, GB | of it permutes | "
        "sent within a slice, GB | gathers | products, PFLOP | compiled in, s | commit |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for line in (line for line in lines if line["program"] == "trainer"):
        it, its = line["figures"], theirs.get(line["case"])
        across = [each for each in it["collectives"] if each["slices"] > 1]
        within = [each for each in it["collectives"] if each["slices"] == 1]
        gathers = [each for each in within if each["axes"] == ["fsdp"] and not each["sums"]]
        permutes = [each for each in across if each["kind"] == "collective-permute"]
        cells = [
            line["case"],
            f"{it['argument_bytes'] / 1e9:.2f}",
            f"{it['temp_bytes'] / 1e9:.2f}",
            f"{its / 1e9:.2f}" if its else "",
            f"{it['temp_bytes'] / its:.2f}" if its else "",
            *(f"{sum(each['bytes'] for each in of) / 1e9:.1f}" for of in (across, permutes, within, gathers)),
            f"{it['flops'] / 1e15:.2f}",
            f"{it['compile_seconds']:.0f}",
            line["commit"],
        ]
        print(f"| {' | '.join(cells)} |")


def _built(settings: list[str]) -> Any:
    import jax

    from trainer.config.load import load
    from trainer.training.build import build

    return build(load(["base.yml", *TIMED, *settings]).config, jax.devices())


def compile_times() -> None:
    """Prints the CPU seconds to trace and compile a step with 2 stages, by the number of microbatches."""
    print("| microbatches | loop over iterations | traced, CPU s | compiled, CPU s | bytes of the program's text |")
    print("|---|---|---|---|---|")
    for scan in (True, False):
        for count in (2, 4, 8):
            own = [f"num_pipeline_microbatches={count}", f"scan_pipeline_iterations={str(scan).lower()}"]
            it = _built(["ici_pipeline_parallelism=2", "ici_data_parallelism=4", "ici_fsdp_parallelism=1", *own])
            begun = time.process_time()
            lowered = it.step.lower(*it.abstract_args())
            traced = time.process_time()
            text = lowered.compile().as_text()
            seconds = f"{traced - begun:.1f} | {time.process_time() - traced:.1f}"
            print(f"| {count} | {'rolled' if scan else 'unrolled'} | {seconds} | {len(text)} |", flush=True)


def times(steps: int) -> None:
    """Times the steps of WAYS in turns, and prints the times in seconds and relative to data parallelism."""
    import jax
    from benchmark_default import batch_of

    from trainer.models.families import stacks

    runs = {name: _built(own) for name, own in WAYS.items()}
    programs = {name: (run.compile(), run.init(), batch_of(run)) for name, run in runs.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(steps):
        for name, (step, state, batch) in programs.items():
            begun = time.perf_counter(), time.process_time()
            state, _ = jax.block_until_ready(step(state, batch, ()))
            seconds[name].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
            programs[name] = step, state, batch
    print("| | bubble | 1 / (1 - bubble) | CPU s of a step, least | against data | elapsed s, median | against data |")
    print("|---|---|---|---|---|---|---|")
    least = {name: min(cpu for _, cpu in found) for name, found in seconds.items()}
    middle = {name: statistics.median(elapsed for elapsed, _ in found) for name, found in seconds.items()}
    for name, one in runs.items():
        plan = next((stack.pipeline for stack in stacks(one.config) if stack.pipeline), None)
        bubble = [f"{plan.bubble:.1%}", f"{1 / (1 - plan.bubble):.2f}"] if plan else ["", ""]
        against = [f"{of[name]:.3f} | {of[name] / of['data']:.2f}" for of in (least, middle)]
        print(f"| {' | '.join([name, *bubble, *against])} |")


def main() -> None:
    """Measures, or prints the table of the measurements."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, help="time this many steps on this machine's CPU")
    parser.add_argument("--compile", action="store_true", help="time compilation on this machine's CPU")
    given = parser.parse_args()
    if given.out:
        measure(given.out, given.maxtext, given.only)
    if given.table or given.out:
        table(read(given.table or given.out))
    if given.compile:
        compile_times()
    if given.steps:
        times(given.steps)


if __name__ == "__main__":
    main()
