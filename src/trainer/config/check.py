"""Stage 1 checks: contradictory settings that can be detected without devices."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from trainer.config import flags, scale
from trainer.config.capabilities.activations import ACTIVATIONS
from trainer.config.capabilities.attention_keys import ATTENTION_CHECKS
from trainer.config.capabilities.context_keys import CONTEXT_CHECKS
from trainer.config.capabilities.data_keys import DATA_CHECKS, DATA_PATHS, LISTS_OF_FILES
from trainer.config.capabilities.decoding_keys import DECODING_CHECKS
from trainer.config.capabilities.diloco_keys import DILOCO_CHECKS
from trainer.config.capabilities.expert_keys import EXPERT_CHECKS
from trainer.config.capabilities.invariant_keys import INVARIANT_CHECKS
from trainer.config.capabilities.latent_keys import LATENT_CHECKS
from trainer.config.capabilities.lora_keys import LORA_CHECKS
from trainer.config.capabilities.mtp_keys import MTP_CHECKS
from trainer.config.capabilities.optimizers import groups_of
from trainer.config.capabilities.pipeline_keys import PIPELINE_CHECKS
from trainer.config.capabilities.quantization_keys import QUANTIZATION_CHECKS
from trainer.config.capabilities.rl_keys import RL_CHECKS
from trainer.config.capabilities.sparsity_keys import SPARSITY_CHECKS
from trainer.config.derived import DCN, ICI, MESH_AXES, UNUSED_AXES
from trainer.config.dump import to_flow
from trainer.config.errors import Unbuilt, nearest, shortened
from trainer.config.family import facts_of, lacks, readers
from trainer.config.keys import Config
from trainer.config.paths import path_problem
from trainer.config.rules import collisions
from trainer.config.schema import FLOAT32_MAX
from trainer.config.topologies import find_topology


@dataclass(frozen=True)
class Check:
    """A check of `keys`. `problem(config)` says what is wrong with their values, or returns None."""

    keys: Sequence[str]
    problem: Callable[[Any], str | None]


def contradictions(config: Config, where: Mapping[str, str], broken: set[str]) -> list[str]:
    """Returns one message for each failed check: its keys, their values, where they come from (`where`), and the
    problem.

    Skips checks of keys in `broken`, whose values could not be read.
    """
    messages = []
    facts = None if "decoder_block" in broken else facts_of(config)
    if facts and facts.fixes:
        where = {**where, **dict.fromkeys(facts.fixes, f"always so with decoder_block={config.decoder_block}")}
        config = ConfigDict({**config, **facts.fixes})
    for check in (*CHECKS, *(Check(*one) for one in (facts.checks if facts else ()))):
        if broken.isdisjoint(check.keys) and (problem := check.problem(config)):
            shown = ", ".join(f"{key}={shortened(to_flow(config[key]))} ({where[key]})" for key in check.keys)
            messages.append(type(problem)(f"{shown}: {problem}"))  # an Unbuilt stays an Unbuilt
    return messages


def _checkpoints_to_keep(config: Config) -> str | None:
    number = config.max_num_checkpoints_to_keep
    return "must be at least 1, or none to keep all" if number is not None and number < 1 else None


def _consistent_rms(config: Config) -> str | None:
    number = config.muon_consistent_rms
    return None if number is None or 0 < number <= FLOAT32_MAX else f"must be a number in (0, {FLOAT32_MAX:g}], or none"


def _muon_epsilon(config: Config) -> str | None:
    if config.opt_type != "muon" or config.adam_eps:
        return None
    return (
        "muon divides each matrix by its norm plus adam_eps before Newton-Schulz, and the norm may be 0; adam_eps must "
        "be above 0, such as 1e-8"
    )


def _best(config: Config) -> str | None:
    if (
        not config.keep_best_checkpoints
        or config.eval_interval <= 0
        or not config.eval_interval % config.checkpoint_period
    ):
        return None
    return "only states that are both evaluated and saved can be kept: checkpoint_period must divide eval_interval"


def _sources(config: Config) -> str | None:
    if config.enable_lora:  # the state has the adapters, and load_parameters_path the base, which may have moved
        return None
    return "give only one of them" if config.load_parameters_path and config.load_full_state_path else None


def _path(key: str) -> Callable[[Any], str | None]:
    def problem(config: Config) -> str | None:
        if "://" in config[key]:
            return None  # `_bucket` and `local` report unsupported ones
        separators = "[;,|:]" if key in LISTS_OF_FILES else "$^"
        return next(filter(None, map(path_problem, re.split(separators, config[key]))), None)

    return problem


def _run_name(config: Config) -> str | None:
    if problem := path_problem(f"a/{config.run_name}"):
        return problem
    if "/" in config.run_name or config.run_name in (".", "..") or not config.run_name.isprintable():
        return "must be the name of one folder, without / or control characters; base_output_directory sets its parent"
    return None


def _output_directory(config: Config) -> str | None:
    return None if config.base_output_directory else "empty; use . for the current folder"


def _bucket(key: str) -> Callable[[Any], str | None]:
    def problem(config: Config) -> str | None:
        scheme, separator, _ = config[key].partition("://")
        return Unbuilt("only gs:// is supported for remote paths") if separator and scheme != "gs" else None

    return problem


def _metrics_file(config: Config) -> str | None:
    if "://" in config.metrics_file:
        return "must be a local file; a run in a bucket copies its metrics.jsonl there every log_period updates"
    if not (config.metrics_file or "x").isprintable():
        return "must be a path without control characters"
    if not config.metrics_file or path_problem(config.metrics_file):
        return None  # `_path` reports the second problem
    path = Path(config.metrics_file).expanduser()
    if os.path.exists(path) and not os.path.isfile(path):
        return "exists and is not a file; choose another path"
    parent = next((folder for folder in path.parents if os.path.exists(folder)), None)
    return f"{parent} is not a folder; give a file in a folder" if parent and not os.path.isdir(parent) else None


def _processes(config: Config) -> str | None:
    given = [bool(config.coordinator_address), config.num_processes > 0, config.process_id >= 0]
    if not any(given):
        return None
    if not all(given):
        return "give all three or none, such as coordinator_address=10.0.0.1:1234 num_processes=2 process_id=0"
    if not re.fullmatch(r".+:\d+", config.coordinator_address):
        return f"coordinator_address must be host:port; nearest: {config.coordinator_address}:1234"
    if config.process_id >= config.num_processes:
        return f"process ids start at 0; the largest is process_id={config.num_processes - 1}"
    return None


def _heads(config: Config) -> str | None:
    heads, kv_heads = config.base_num_query_heads, config.base_num_kv_heads
    if heads % kv_heads == 0:
        return None
    divisors = {d for n in range(1, math.isqrt(heads) + 1) if heads % n == 0 for d in (n, heads // n)}
    best = min(divisors, key=lambda n: abs(n - kv_heads))
    return f"the number of query heads must be a multiple of the key-value heads; nearest: base_num_kv_heads={best}"


def _head_dim(config: Config) -> str | None:
    if config.head_dim % 2:
        return f"must be even, since RoPE rotates pairs; nearest: {config.head_dim - 1} or {config.head_dim + 1}"
    return None


def _clip_and_norm(config: Config) -> str | None:
    if config.use_qk_clip and config.use_qk_norm:
        return (
            "norms of queries and keys undo a scale of their weights, and bound the logits already; use one of the two"
        )
    return None


def _clip_and_cap(config: Config) -> str | None:
    if config.use_qk_clip and config.attn_logits_soft_cap:
        return "a soft cap bounds the logits already, and scaled weights do not scale capped logits; use one of the two"
    return None


def _custom_tensors(config: Config) -> str | None:
    twice = [name for name in config.custom_device_tensors if name in config.custom_offload_tensors]
    return f"{shortened(twice[0])} is in both; keep it in one of them" if twice else None


def _rope(config: Config) -> str | None:
    if config.rope_min_timescale < config.rope_max_timescale:
        return None
    return "the shortest wavelength must be less than the longest"


def _llama_rope(config: Config) -> str | None:
    if config.rope_type != "llama3.1" or config.rope_low_freq_factor < config.rope_high_freq_factor:
        return None
    return "with rope_type=llama3.1 the low factor must be less than the high one"


def _yarn(config: Config) -> str | None:
    if config.rope_type != "yarn" or config.beta_slow <= config.beta_fast:
        return None
    return "with rope_type=yarn beta_slow must not be greater than beta_fast"


def _activations(config: Config) -> str | None:
    if len(config.mlp_activations) not in (1, 2):
        return f"must have one, or two for a gated MLP; allowed: {', '.join(ACTIVATIONS)}"
    for name in config.mlp_activations:
        if name not in ACTIVATIONS:
            allowed = f"{', '.join(ACTIVATIONS)}{nearest(name, ACTIVATIONS)}"
            return f"there is no activation {shortened(name)}; allowed: {allowed}"
    return None


def _positions(config: Config) -> str | None:
    if config.trainable_position_size == -1 or config.trainable_position_size >= config.max_target_length:
        return None
    return "a row has more positions than the table"


def _fused(config: Config) -> str | None:
    if not config.fused_qkv or not lacks(config, "fused_qkv"):
        return None
    return f"this family has separate matrices for queries, keys and values; only {readers('fused_qkv')} can fuse them"


def _schedule_shares(config: Config) -> str | None:
    total = config.warmup_steps_fraction + config.wsd_decay_steps_fraction
    if config.lr_schedule_type != "wsd" or total <= 1 + 1e-9:
        return None
    return f"with lr_schedule_type=wsd warm-up and decay are {total:g} of the schedule; the maximum is 1"


def _steps(config: Config) -> str | None:
    if config.steps == -1 and config.learning_rate_schedule_steps == -1:
        return "each is set to follow the other; set one of them to a number"
    return None


def _profiled(config: Config) -> str | None:
    if not config.profiler or config.steps == -1 or config.skip_first_n_steps_for_profiler < config.steps:
        return None
    return "the run ends before the first step to profile; skip fewer steps"


def _profiled_again(config: Config) -> str | None:
    if not config.profiler or not 0 < config.profile_periodically_period < config.profiler_steps:
        return None
    return "a trace would begin before the last one ends"


def _regexes(key: str) -> Callable[[Any], str | None]:
    def problem(config: Config) -> str | None:
        for pattern in config[key] or ():
            try:
                re.compile(pattern)
            except re.error as error:
                return f"{pattern!r} is not a regular expression: {error}"
        return None

    return problem


def _groups(config: Config) -> str | None:
    try:
        groups_of(config.learning_rate_groups)
    except ValueError as error:
        return str(error)
    return None


def _open_axes(keys: Sequence[str]) -> Callable[[Any], str | None]:
    def problem(config: Config) -> str | None:
        unknown = [key for key in keys if config[key] == -1]
        return "only one of them may be -1, which takes the remaining devices" if len(unknown) > 1 else None

    return problem


def _unused_axis(key: str, reason: str) -> Callable[[Any], str | None]:
    return lambda config: None if config[key] == 1 else Unbuilt(f"{reason}; leave it at 1")


def _rules(config: Config) -> str | None:
    clashes = collisions(config)
    return f"{'; '.join(clashes)}; move one of the two to another mesh axis or to []" if clashes else None


def _topology(config: Config) -> str | None:
    topology = find_topology(config.compile_topology) if config.compile_topology else None
    return topology if isinstance(topology, str) else None


def _slices(config: Config) -> str | None:
    simulated = config.compile_topology.startswith("cpu-")
    return (
        "simulated CPU devices have no slices: give cpu-N with the total number"
        if simulated and config.compile_topology_num_slices > 1
        else None
    )


# The keys of the axis sizes, within a slice and across slices.
_SIZES = tuple(tuple(keys[axis] for axis in MESH_AXES if axis not in UNUSED_AXES) for keys in (ICI, DCN))

_PATHS = (
    "base_output_directory",
    "load_parameters_path",
    "load_full_state_path",
    "lora_restore_path",
    "compiled_trainstep_file",
    "compile_report_file",
    "metrics_file",
    "dump_hlo_local_dir",
    *("dataset_name", "eval_dataset_name", "hf_name", "hf_data_dir"),  # relative to another path
)

CHECKS = (
    Check(flags.FLAGS, flags.unsupported),
    Check(("max_num_checkpoints_to_keep",), _checkpoints_to_keep),
    Check(("muon_consistent_rms",), _consistent_rms),
    Check(("opt_type", "adam_eps"), _muon_epsilon),
    Check(("keep_best_checkpoints", "checkpoint_period", "eval_interval"), _best),
    Check(("load_parameters_path", "load_full_state_path"), _sources),
    Check(("run_name",), _run_name),
    Check(("base_output_directory",), _output_directory),
    *(Check((key,), _bucket(key)) for key in ("base_output_directory", "load_parameters_path", "load_full_state_path")),
    Check(("metrics_file",), _metrics_file),
    *(Check((key,), _path(key)) for key in (*DATA_PATHS, *_PATHS)),
    Check(("coordinator_address", "num_processes", "process_id"), _processes),
    Check(("global_parameter_scale",), scale.problem),
    Check(("base_num_query_heads", "base_num_kv_heads"), _heads),
    Check(("head_dim",), _head_dim),
    Check(("custom_device_tensors", "custom_offload_tensors"), _custom_tensors),
    Check(("rope_min_timescale", "rope_max_timescale"), _rope),
    Check(("rope_low_freq_factor", "rope_high_freq_factor"), _llama_rope),
    Check(("beta_slow", "beta_fast"), _yarn),
    Check(("use_qk_clip", "use_qk_norm"), _clip_and_norm),
    Check(("use_qk_clip", "attn_logits_soft_cap"), _clip_and_cap),
    Check(("mlp_activations",), _activations),
    Check(("trainable_position_size", "max_target_length"), _positions),
    Check(("decoder_block", "fused_qkv"), _fused),
    Check(("warmup_steps_fraction", "wsd_decay_steps_fraction"), _schedule_shares),
    Check(("steps", "learning_rate_schedule_steps"), _steps),
    Check(("profiler", "skip_first_n_steps_for_profiler", "steps"), _profiled),
    Check(("profile_periodically_period", "profiler_steps"), _profiled_again),
    Check(("adamw_mask",), _regexes("adamw_mask")),
    Check(("trainable_parameters_mask",), _regexes("trainable_parameters_mask")),
    Check(("unquantized_modules",), _regexes("unquantized_modules")),
    Check(("learning_rate_groups",), _groups),
    *(Check(keys, _open_axes(keys)) for keys in _SIZES),
    *(
        Check((keys[axis],), _unused_axis(keys[axis], reason))
        for axis, reason in UNUSED_AXES.items()
        for keys in (ICI, DCN)
    ),
    Check(("logical_axis_rules",), _rules),
    Check(("compile_topology",), _topology),
    Check(("compile_topology", "compile_topology_num_slices"), _slices),
    *(
        Check(keys, problem)
        for keys, problem in (
            *(*ATTENTION_CHECKS, *EXPERT_CHECKS, *LATENT_CHECKS, *MTP_CHECKS, *DILOCO_CHECKS, *DATA_CHECKS),
            *PIPELINE_CHECKS,
            *CONTEXT_CHECKS,
            *DECODING_CHECKS,
            *RL_CHECKS,
            *QUANTIZATION_CHECKS,
            *SPARSITY_CHECKS,
            *LORA_CHECKS,
            *INVARIANT_CHECKS,
        )
    ),
)
