"""The keys of a run and of its output."""

import os
from pathlib import Path

from trainer.config.key_rows import Check, Inert, Place, Resume, Row, refused
from trainer.config.keys import Config
from trainer.config.paths import path_problem


def _run_name(config: Config) -> str | None:
    if problem := path_problem(f"a/{config.run_name}"):
        return problem
    if "/" in config.run_name or config.run_name in (".", "..") or not config.run_name.isprintable():
        return "must be the name of one folder, without / or control characters; base_output_directory sets its parent"
    return None


def _metrics_file(config: Config) -> str | None:
    if "://" in config.metrics_file:
        return "must be a local file; a run in a bucket copies its metrics.jsonl to the bucket every log_period updates"
    if not (config.metrics_file or "x").isprintable():
        return "must be a path without control characters"
    if not config.metrics_file or path_problem(config.metrics_file):
        return None  # `check._path` reports an invalid path
    path = Path(config.metrics_file).expanduser()
    if os.path.exists(path) and not os.path.isfile(path):
        return "exists and is not a file; choose another path"
    parent = next((folder for folder in path.parents if os.path.exists(folder)), None)
    return f"{parent} is not a folder; give a file in a folder" if parent and not os.path.isdir(parent) else None


ROWS = (
    Row(("base_output_directory",), Resume.AROUND, step=False, path=Place.BUCKET),
    Row(("metrics_file", "dump_hlo_local_dir"), Resume.AROUND, step=False, path=Place.ANY),
    Row(
        (
            *("run_name", "log_config", "log_period", "enable_tensorboard", "dump_hlo", "override_model_config"),
            "model_name",  # a name for a set of sizes; resume compares the sizes themselves
            *("profiler", "skip_first_n_steps_for_profiler", "profiler_steps", "profile_periodically_period"),
        ),
        Resume.AROUND,
        step=False,
    ),
    Row(("record_internal_nn_metrics", "parameter_metrics_period"), Resume.AROUND),
)
CHECKS: tuple[Check, ...] = (
    (("run_name",), _run_name),
    refused(("base_output_directory",), lambda c: not c.base_output_directory, "empty; use . for the current folder"),
    (("metrics_file",), _metrics_file),
    refused(
        ("profiler", "skip_first_n_steps_for_profiler", "steps"),
        lambda c: c.profiler and -1 != c.steps <= c.skip_first_n_steps_for_profiler,
        "the run ends before the first step to profile; skip fewer steps",
    ),
    refused(
        ("profile_periodically_period", "profiler_steps"),
        lambda c: c.profiler and 0 < c.profile_periodically_period < c.profiler_steps,
        "a trace would begin before the previous one ends",
    ),
)
INERT = (
    Inert(("override_model_config",), lambda c: True, "the command line always overrides the preset"),
    Inert(
        ("skip_first_n_steps_for_profiler", "profiler_steps", "profile_periodically_period"),
        lambda c: not c.profiler,
        "profiler is empty",
    ),
    Inert(("dump_hlo_local_dir",), lambda c: not c.dump_hlo, "dump_hlo=false"),
)
