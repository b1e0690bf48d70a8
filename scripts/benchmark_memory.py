"""Compares the memory of compiled steps with that of MaxText's steps: the tables of docs/benchmarks/ahead-of-time.md.

    python scripts/benchmark_memory.py --out memory.jsonl --maxtext DIR --only main
    python scripts/benchmark_memory.py --out memory.jsonl --only "tensor 4" --set "logical_axis_rules=[[norm,[fsdp]]]"
    python scripts/benchmark_memory.py --table memory.jsonl

DIR/env is MaxText's virtual environment. DIR/src contains MaxText's sources. Without DIR/src, the MaxText package must
be installed in the environment, and the file DIR/base_yml must contain the path of its base.yml.

The cases are compiled one at a time, each in its own process. Compilation needs libtpu, and takes one to two minutes on
two idle cores. Cases that the file already contains are not measured again: MaxText is measured once per case, this
project once per case, commit and settings.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = "dataset_type=synthetic max_target_length=2048 remat_policy=full attention=flash"
# model, topology, slices, mesh, rows per device
CASES = {
    "main": (
        ("llama2-7b", "v5e-16", 1, "fsdp 16", 1),
        ("deepseek2-16b", "v5p-16", 1, "fsdp 8", 1),
        ("qwen3-8b", "v6e-16", 1, "fsdp 16", 2),
        ("llama3.1-70b", "v5p-128", 1, "fsdp 16, tensor 4", 1),
        ("mixtral-8x7b", "v5p-64", 1, "fsdp 32", 1),
        ("mistral-7b", "v5e-16", 1, "fsdp 16", 1),
        ("llama2-7b", "v5e-16", 1, "fsdp 4, tensor 4", 1),
        ("llama3.1-8b", "v5p-8", 1, "data 2, fsdp 2", 1),
        ("qwen3-0.6b", "v5e-16", 1, "data 16", 1),
        ("llama2-13b", "v5e-16", 2, "dcn_data 2, fsdp 16", 1),
    ),
    "tensor": (
        ("llama3.1-8b", "v5e-64", 1, "fsdp 16, tensor 4", 1),
        ("mistral-7b", "v5p-16", 1, "fsdp 4, tensor 2", 2),
        ("llama2-7b", "v5e-16", 1, "fsdp 4, tensor 4", 1),
        ("qwen3-0.6b", "v5e-16", 1, "fsdp 8, tensor 2", 4),
        ("qwen3-8b", "v6e-16", 1, "fsdp 2, tensor 8", 1),
        ("llama2-13b", "v5p-32", 1, "fsdp 4, tensor 4", 2),
    ),
    "data": (("qwen3-0.6b", "v5e-16", 1, "data 16", 1),),
    "fsdp": (
        *(("llama2-7b", "v5e-16", 1, "fsdp 16", rows) for rows in (1, 2, 3, 4)),
        ("llama2-7b", "v5e-256", 1, "fsdp 256", 4),
        ("llama3.1-70b", "v5p-256", 1, "fsdp 128", 1),
        ("qwen3-8b", "v6e-16", 1, "fsdp 16", 2),
        ("mistral-7b", "v5e-16", 1, "fsdp 16", 1),
        ("llama2-13b", "v5e-16", 2, "dcn_data 2, fsdp 16", 1),
    ),
    "diloco": (
        ("llama2-7b", "v5e-16", 1, "fsdp 16", 1),
        ("llama2-7b", "v5e-16", 2, "dcn_data 2, fsdp 16", 1),
        ("llama2-7b", "v5e-16", 2, "dcn_diloco 2, fsdp 16", 1),
    ),
    "families": (
        ("gemma3-27b", "v5p-64", 1, "fsdp 32", 1),
        ("qwen2.5-14b", "v5e-64", 1, "fsdp 64", 1),
        ("gpt-oss-20b", "v5e-32", 1, "fsdp 32", 1),
        ("llama4-17b-16e", "v5p-64", 1, "fsdp 32", 1),
        ("qwen3-next-80b-a3b", "v5p-64", 1, "fsdp 32", 1),
    ),
    "other": (
        ("qwen3-4b", "v5e-16", 1, "fsdp 4, tensor 4", 1),
        ("llama3.1-8b", "v5p-8", 1, "data 2, fsdp 2", 1),
        ("qwen3-1.7b", "v5p-8", 1, "data 4", 1),
    ),
}
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def keys(case: tuple[Any, ...]) -> list[str]:
    """Returns the command line of a case, the same for both programs."""
    model, topology, slices, mesh, rows = case
    sizes = {"ici_fsdp": "1"} | {
        axis if axis.startswith("dcn_") else f"ici_{axis}": size for axis, size in map(str.split, mesh.split(", "))
    }
    return [
        f"model_name={model}",
        f"compile_topology={topology}",
        f"compile_topology_num_slices={slices}",
        *(f"{axis}_parallelism={size}" for axis, size in sizes.items()),
        f"per_device_batch_size={rows}",
        # On a small torus, a mesh of several axes may require that physical axes are split.
        *(["allow_split_physical_axes=true"] if "tensor" in mesh else []),
        *(["enable_diloco=true"] if "diloco" in mesh else []),
        *SETTINGS.split(),
    ]


def trainer(arguments: list[str]) -> dict[str, Any]:
    """Returns bytes and FLOPs of this project's step."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "trainer.train_compile", "base.yml", f"compile_report_file={file}", *arguments]
        run(command, ROOT, {"PYTHONPATH": str(ROOT / "src")})
        report = json.loads(file.read_text())
    names = ("temp_bytes", "argument_bytes", "flops", "bytes_accessed", "rolled_flops", "rolled_bytes_accessed")
    return {name: report[name] for name in names} | {
        "sent_bytes": sum(collective["bytes"] for collective in report["collectives"]),
        "serial_seconds": report["estimate"] and report["estimate"]["serial_seconds"],
    }


def maxtext(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Returns bytes and FLOPs of MaxText's step, from the output of its train_compile."""
    sources, installed = folder / "src", folder / "base_yml"
    base = "maxtext/configs/base.yml" if sources.exists() else installed.read_text().strip()
    module = ["-m", "maxtext.trainers.pre_train.train_compile", base, "enable_checkpointing=false"]
    where = sources if sources.exists() else folder
    said = run([str(folder / "env/bin/python"), *module, "run_name=memory", *arguments], where, {})
    sizes = {name: int(size) for name, size in re.findall(r"(\w+)_size_in_bytes=(\d+)", said)}
    costs = {name: float(value) for name, value in re.findall(r"'(flops|bytes accessed)': ([\d.e+]+)", said)}
    return {
        "temp_bytes": sizes["temp"],
        "argument_bytes": sizes["argument"],
        "rolled_flops": costs["flops"],
        "rolled_bytes_accessed": costs["bytes accessed"],
    }


def run(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    """Returns the output of a command. Raises SystemExit if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | ENVIRONMENT | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")
    return done.stdout


def measure(out: Path, folder: Path | None, only: str, settings: list[str]) -> None:
    """Measures cases and appends their figures to `out`, unless `out` already contains them. The cases are those of the
    group `only`, or, if there is no such group, those whose names contain `only`."""
    commit = run(["git", "describe", "--always", "--dirty"], ROOT, {}).strip()
    have = [{**line, "figures": None} for line in read(out)]
    named = dict.fromkeys(case for cases in CASES.values() for case in cases if only in name_of(case))
    for case in CASES.get(only) or named:
        mine = {"program": "trainer", "case": name_of(case), "commit": commit, "settings": settings, "figures": None}
        its = {"program": "maxtext", "case": name_of(case), "figures": None}
        if mine not in have:
            write(out, mine | {"figures": trainer([*keys(case), *settings])})
        if folder is not None and its not in have:
            write(out, its | {"figures": maxtext(folder, keys(case))})


def name_of(case: tuple[Any, ...]) -> str:
    """Returns the name of a case."""
    model, topology, slices, mesh, rows = case
    return f"{model}, {f'{slices} x ' if slices > 1 else ''}{topology}, {mesh}, {rows} row{'s' if rows > 1 else ''}"


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the records of a file of figures (JSON lines); [] if the file does not exist."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write(file: Path, line: dict[str, Any]) -> None:
    """Appends a record to a file of figures."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def table(lines: list[dict[str, Any]]) -> None:
    """Prints a row for each of this project's records, with MaxText's figures if there are any for the case."""
    theirs = {line["case"]: line["figures"] for line in lines if line["program"] == "maxtext"}
    print("| | MaxText | trainer | | rolled FLOPs | GB accessed | GB sent | estimate, s | commit, settings |")
    print("|---|---|---|---|---|---|---|---|---|")
    for line in (line for line in lines if line["program"] == "trainer"):
        it, its = line["figures"], theirs.get(line["case"])
        of_theirs = (
            [f"{its['temp_bytes'] / 1e9:.3f}", f"{it['temp_bytes'] / its['temp_bytes']:.0%}"] if its else ["", ""]
        )
        cells = [
            line["case"],
            of_theirs[0],
            f"{it['temp_bytes'] / 1e9:.3f}",
            of_theirs[1],
            f"{it['rolled_flops']:.2e}" + (f" ({its['rolled_flops']:.2e})" if its else ""),
            f"{it['bytes_accessed'] / 1e9:.0f}",
            f"{it['sent_bytes'] / 1e9:.1f}",
            "" if it["serial_seconds"] is None else f"{it['serial_seconds']:.2f}",
            " ".join([line["commit"], *line["settings"]]),
        ]
        print(f"| {' | '.join(cells)} |")


def options(
    description: str | None, only: str = "measure only cases whose names contain this"
) -> argparse.ArgumentParser:
    """Returns an argument parser for the options that all benchmarks with compiled cases share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="measure, and append the figures to this file")
    parser.add_argument("--maxtext", type=Path, help="folder with MaxText; default: measure only this project")
    parser.add_argument("--only", default="", help=only)
    parser.add_argument("--table", type=Path, help="print the figures of this file")
    return parser


def main() -> None:
    """Measures, or prints the table of the measurements."""
    parser = options(__doc__, f"a group ({', '.join(CASES)}), or a part of cases' names")
    parser.add_argument("--set", action="append", default=[], help="an additional setting of this project, key=value")
    given = parser.parse_args()
    if given.out:
        measure(given.out, given.maxtext, given.only, given.set)
    if given.table or given.out:
        table(read(given.table or given.out))


if __name__ == "__main__":
    main()
