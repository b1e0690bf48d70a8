"""Compares plans with brute force: `python scripts/check_plan.py [dense slices offload experts] [--folder FOLDER]`.

Each of these search spaces has at least 60 points, which are configurations of a tiny model. The plan runs without a
limit on compilations; then every point that it did not compile is compiled, too. No point that fits may be better than
the plan's winner, whether the plan compiled the point or its bounds excluded the point. The memory of some points must
equal that of a separate train_compile. Results are kept in FOLDER/SPACE.jsonl, so the script can be interrupted. It
needs libtpu, and takes about half an hour per space on two cores.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"  # the platform of this process, which compiles for other platforms

from trainer.aot.topologies import devices_of, topology_of
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.load import load
from trainer.planning.candidate import FITS, Candidate, kept
from trainer.planning.compilation import Compiler
from trainer.planning.families import Checks
from trainer.planning.journal import Journal, program_key
from trainer.planning.search import Search
from trainer.planning.space import default_space
from trainer.train_compile import compile_for_topology

TINY = (
    *("base_emb_dim=256", "base_num_query_heads=4", "base_num_kv_heads=4", "head_dim=128", "base_mlp_dim=1024"),
    *("base_num_decoder_layers=24", "vocab_size=1024", "max_target_length=128", "attention=flash"),
    *("dataset_type=synthetic", "eval_interval=-1"),
)
# With so many rows, only some policies and meshes fit into 32 GiB.
ROWS = {"per_device_batch_size": [2, 8192], "num_vocab_tiling": [1]}
POLICIES = {"remat_policy": ["none", "minimal", "full"]}
NO_OFFLOAD = {"optimizer_memory_host_offload": [False], "parameter_memory_host_offload": [False]}
MEMORY_CHECKED = 2  # points per space whose memory is compared with that of train_compile
# With this compiler option, programs are less optimized and compile faster. The plan and brute force both use it.
QUICKLY = {"exec_time_optimization_effort": -1.0}


class Question(NamedTuple):
    """A planning problem: key=value arguments that apply to every point, and the keys to search, each with its
    values."""

    words: Sequence[str]
    search: Mapping[str, Sequence[Any]]


QUESTIONS = {
    "dense": Question(
        ("compile_topology=v4-8", "allow_split_physical_axes=true", "ici_pipeline_parallelism=1"),
        ROWS | POLICIES | NO_OFFLOAD,
    ),
    "slices": Question(
        (
            "compile_topology=v4-8",
            "compile_topology_num_slices=2",
            "ici_pipeline_parallelism=1",
            "ici_context_parallelism=1",
        ),
        {f"dcn_{axis}_parallelism": [1] for axis in ("pipeline", "context", "tensor")}
        | ROWS
        | {"remat_policy": ["minimal", "full"]}
        | NO_OFFLOAD,
    ),
    "offload": Question(
        (
            "compile_topology=v4-8",
            "ici_pipeline_parallelism=1",
            "ici_context_parallelism=1",
            "ici_tensor_parallelism=1",
        ),
        {"remat_policy": ["full", "minimal_offloaded"]} | ROWS,
    ),
    "experts": Question(
        (
            *("compile_topology=v4-8", "decoder_block=mixtral", "num_experts=8", "base_moe_mlp_dim=512"),
            *("capacity_factor=1.25", "sparse_matmul=false", "ici_pipeline_parallelism=1", "ici_context_parallelism=1"),
        ),
        ROWS | POLICIES | NO_OFFLOAD,
    ),
}


def main() -> None:
    """Checks the spaces that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spaces", nargs="*", default=[*QUESTIONS], choices=[*QUESTIONS, []])
    parser.add_argument("--folder", type=Path, default=Path("plans"))
    arguments = parser.parse_args()
    wrong = 0
    for name in arguments.spaces:
        wrong += _check(name, QUESTIONS[name], arguments.folder)
    sys.exit(1 if wrong else 0)


def _check(name: str, question: Question, folder: Path) -> int:
    """Checks one space. Returns the number of errors."""
    loaded = load(["base.yml", *TINY, *question.words])
    config, topology, slices = loaded.config, topology_of(loaded.config), loaded.config.compile_topology_num_slices
    space = default_space(config, topology.devices, slices, loaded.changed, question.search)
    journal, devices = Journal(folder / f"{name}.jsonl"), devices_of(topology, slices)
    search, checks = Search(config, space, devices, journal, _compile_here, limit=space.size), Checks(config, devices)
    search.run(ends=_print)
    wrong = [] if search.best else ["nothing fits"]
    compiled = {str(sorted(found.changes.items())) for found in search.candidates}
    tried = fitting = 0
    for point in space.points():
        found = Candidate(dict(point), *_row(search, checks, journal, point))
        if not found.row:
            continue  # refused
        tried += 1
        fits = found.outcome == FITS and not found.lower_bound
        fitting += fits
        if fits and search.best and search.merit(found) > search.merit(search.best):
            how = "compiled" if str(sorted(point.items())) in compiled else "excluded"
            wrong.append(f"{how} {found.tokens_per_second:.0f} > {search.best.tokens_per_second:.0f} tok/s: {point}")
    wrong += _other_memory(config, search)
    counts = search.counts
    print(f"{name}: {space.size} points, {counts.refused} refused, {tried} compiled by brute force, {fitting} fit")
    print(
        f"  the plan compiled {counts.compiled + counts.known}; bounds excluded {counts.too_large} and {counts.worse}"
    )
    print(f"  winner: {search.best and search.best.changes}")
    for line in wrong:
        print(f"  WRONG: {line}")
    return len(wrong)


def _row(
    search: Search, checks: Checks, journal: Journal, point: Mapping[str, Any]
) -> tuple[str, int, Mapping[str, Any]]:
    """Returns the outcome of a point, its tokens per update, and its row of the journal. Compiles the point if the
    journal has no row for it. The row is empty if the point is refused."""
    tokens = search.tokens(point)
    try:
        resolved = Config(checks.resolved(point))
    except UserError:
        return "", tokens, {}
    key = program_key(resolved)
    if key not in journal.rows:
        journal.add({"key": key, "changes": dict(point), **_compile_here(Config({**search.config, **point}))})
    return journal.rows[key]["outcome"], tokens, journal.rows[key]


def _other_memory(config: Config, search: Search) -> list[str]:
    """Compiles some points both in this process and with train_compile in another process. Returns an error for each
    point whose memory differs."""
    rows = [found for found in search.candidates if found.memory]
    wrong = []
    for found in random.Random(0).sample(rows, min(MEMORY_CHECKED, len(rows))):
        point = Config({**config, **found.changes})
        here, there = (row["report"].get("peak_bytes") for row in (_compile_here(point, {}), Compiler()(point)))
        if here != there:
            wrong.append(f"{here} bytes, train_compile {there}: {found.changes}")
    return wrong


def _compile_here(config: Config, options: Mapping[str, Any] = QUICKLY) -> dict[str, Any]:
    """Compiles a point and returns its row for the journal. Compiling in this process is faster than with `Compiler`,
    which starts a new process for each point."""
    began, row = time.monotonic(), {"memory": 0, "again": False}
    try:
        report = compile_for_topology(config, options).report
    except UserError as error:
        return row | {"wall_seconds": 0.0, "outcome": "failed", "reason": str(error), "report": {}}
    row |= {"wall_seconds": round(time.monotonic() - began, 1), "reason": "", "report": kept(report.as_dict())}
    return row | {"outcome": FITS if report.fits else "does not fit"}


def _print(candidate: Candidate) -> None:
    print(f"  {candidate.outcome}, {candidate.tokens_per_second:.0f} tok/s, {candidate.changes}", flush=True)


if __name__ == "__main__":
    main()
