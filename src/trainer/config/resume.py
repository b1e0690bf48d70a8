"""The keys that may differ between a checkpoint and the command that resumes from it."""

from collections.abc import Mapping
from typing import Any

import ml_collections

from trainer.config.capabilities.context_keys import KEYS as CONTEXT
from trainer.config.capabilities.context_keys import parts
from trainer.config.capabilities.decoding_keys import DRAWN
from trainer.config.capabilities.decoding_keys import KEYS as DECODING
from trainer.config.capabilities.optimizers import KEYS as OF_OPTIMIZERS
from trainer.config.capabilities.pipeline_keys import KEYS as PIPELINE
from trainer.config.capabilities.splash_tiles import KEYS as TILES
from trainer.config.derived import DCN, ICI, global_batch_rows, has_dropout, has_reference, islands
from trainer.config.dump import PROCESSES, to_flow
from trainer.config.errors import UserError
from trainer.config.flags import FLAGS
from trainer.config.keys import Config
from trainer.config.resolve import frozen
from trainer.config.schema import schema

# How the program is sharded and where it runs. These keys affect the training result only by the order of sums and, for
# `num_vocab_tiling` in bfloat16, by the rounding of the head's gradient.
LAYOUT = (
    *FLAGS,
    *ICI.values(),
    *DCN.values(),
    "allow_split_physical_axes",
    "shard_optimizer_over_data",
    "optimizer_memory_host_offload",
    "parameter_memory_host_offload",
    "logical_axis_rules",
    "sharding_tolerance",
    "debug_sharding",
    "scan_layers",
    *PIPELINE,
    *CONTEXT,
    *TILES.values(),
    "num_vocab_tiling",
    *PROCESSES,
)
# Of these, the keys that leave the program's arithmetic as it is.
_SAME_BITS = (
    *FLAGS,
    *PROCESSES,
    *("sharding_tolerance", "debug_sharding", "optimizer_memory_host_offload", "parameter_memory_host_offload"),
)
# May change where rows are split over devices in another way, because few kernels support each strategy.
# The same global batch may be split differently.
BATCH = ("per_device_batch_size", "gradient_accumulation_steps")
# The length of the run. The schedule follows it unless its own length is given.
LENGTH = ("steps", "num_epoch", "num_batches", "learning_rate_schedule_steps")
# What to write, keep, print and evaluate, and how to treat a bad step. If evaluation takes its rows from the training
# documents, the fingerprint of the data detects a change.
AROUND = (
    "run_name",
    "base_output_directory",
    "log_config",
    "metrics_file",
    "enable_tensorboard",
    "profiler",
    "skip_first_n_steps_for_profiler",
    "profiler_steps",
    "profile_periodically_period",
    "dump_hlo",
    "dump_hlo_local_dir",
    "log_period",
    "record_internal_nn_metrics",
    "parameter_metrics_period",
    "routed_bias_update_rate",  # DeepSeek-V3 sets it to 0 for the last part of its training
    "weight_sparsity_update_step",  # a large one keeps the masks for the last part of a training
    "enable_checkpointing",
    "checkpoint_period",
    "save_checkpoint_on_start",
    "save_checkpoint_on_completion",
    "async_checkpointing",
    "max_num_checkpoints_to_keep",
    "checkpoint_keep_period",
    "keep_best_checkpoints",
    "reset_optimizer",  # see `resets`
    "abort_on_nan_loss",
    "abort_on_inf_loss",
    "skip_step_scaling_factor",
    "eval_interval",
    "eval_steps",
    "eval_per_device_batch_size",
    "mtp_eval_target_module",
    "eval_dataset_name",
    "eval_split",
    "eval_data_columns",
    "tokenize_eval_data",
    "grain_eval_files",
    "hf_eval_split",
    "hf_eval_files",
    "data_cache_directory",
    *("prompt", *DECODING),
    "override_model_config",
    "compile_topology",
    "compile_topology_num_slices",
    "compiled_trainstep_file",
    "compile_report_file",
    "model_name",  # a name for sizes; the sizes themselves are compared
    # Where and how long reward functions run, and how many completions are generated at once.
    *("reward_num_workers", "reward_worker_timeout_seconds", "rollout_micro_batch_size"),
)
# When fragments of DiLoCo synchronize, which layers they have, and when islands take them over.
TIMETABLE = (
    "diloco_sync_period",
    "enable_streaming_diloco",
    "num_diloco_fragments",
    "use_sequential_layers",
    "num_communication_overlapping_steps",
)
# How gradients become an update. These keys may change with `reset_optimizer`, which resets all of this state.
UPDATE = (
    "learning_rate",
    "learning_rate_final_fraction",
    "lr_schedule_type",
    "warmup_steps_fraction",
    "wsd_decay_steps_fraction",
    "wsd_decay_style",
    "opt_type",
    *OF_OPTIMIZERS,
    "trainable_parameters_mask",
    "grad_dtype",
    "weight_stochastic_rounding",
    "gradient_clipping_value",
    "gradient_clipping_threshold",
    "learning_rate_groups",
    "skip_step_on_spikes",
    "skip_step_interval",
    "ema_decay",
    "use_qk_clip",
    "qk_clip_threshold",
    "qk_clip_interval",
    *TIMETABLE,
    "diloco_outer_lr",
    "diloco_outer_momentum",
    "diloco_outer_grad_dtype",
    "communication_overlapping_alpha",
)
MAY_CHANGE = frozenset((*LAYOUT, *BATCH, *LENGTH, *AROUND))
_RESET = "its parameters and a fresh optimizer: reset_optimizer=true"


def check_resume(saved: Mapping[str, Any], config: Config, schedule_given: bool, where: str) -> list[str]:
    """Returns warnings about resuming under `config` from a checkpoint with the configuration `saved`.

    Args:
      saved: the keys of a config.yml. If a key is missing, it was added to base.yml later; its default is the old
        behaviour.
      config: resolved.
      schedule_given: whether the command gives `learning_rate_schedule_steps`.
      where: the checkpoint, for the message.

    Raises:
      UserError: a key differs that must not differ; the message has the old and new values.
    """
    before = _with_defaults(saved)
    differing = [name for name in schema().keys if before[name] != frozen(config[name])]
    allowed = MAY_CHANGE.union(UPDATE) if config.reset_optimizer else MAY_CHANGE
    if config.enable_lora or has_reference(config):
        allowed = allowed.union(["load_parameters_path"])  # base and reference, which the checkpoint recognizes
    if _rows_split(before) != _rows_split(config):
        allowed = allowed.union(["attention"])
    if not has_dropout(before) and not has_dropout(config):
        allowed = allowed.union(["enable_dropout"])
    if config.use_grpo:
        allowed = allowed.difference(DRAWN)
    wrong = [_change(before, config, name) for name in differing if name not in allowed]
    if global_batch_rows(before) != global_batch_rows(config):
        changes = ", ".join(_change(before, config, name) for name in BATCH if name in differing)
        rows = f"{global_batch_rows(before)} -> {global_batch_rows(config)} rows"
        wrong.append(f"the global batch must not change, {rows}: {changes or 'another number of devices'}")
    if before.enable_diloco and config.enable_diloco and islands(before) != islands(config):
        wrong.append(_other_islands(before, config))
    warnings = []
    if "learning_rate_schedule_steps" in differing:
        change = _change(before, config, "learning_rate_schedule_steps")
        if config.reset_optimizer:
            warnings.append(change)
        elif schedule_given or before.learning_rate_schedule_steps != before.steps:
            wrong.append(change)
        else:
            warnings.append(f"the learning rate schedule follows steps: {change}")
    if wrong:
        lines = "\n  ".join(wrong)
        resettable = not config.reset_optimizer and not set(differing).isdisjoint(UPDATE)
        raise UserError(
            f"{where} was saved with another configuration (old -> new):\n  {lines}\n"
            "use the old values, or choose another run_name for a new run"
            + (f", or continue with {_RESET}" if resettable else "")
        )
    return warnings


def another_update(saved: Mapping[str, Any], config: Config) -> str:
    """Returns a line if a run that begins with the whole state of another, which has the configuration `saved`, makes
    updates in another way; "" if it does not."""
    before = _with_defaults(saved)
    changes = ", ".join(_change(before, config, name) for name in UPDATE if before[name] != frozen(config[name]))
    return changes and f"its updates were made with other keys (old -> new): {changes}"


def another_program(saved: Mapping[str, Any], config: Config) -> str:
    """Returns a line if a checkpoint with the configuration `saved` resumes in another program for the same math, which
    may round differently; "" if the program is the same."""
    before = _with_defaults(saved)
    changed = [
        name
        for name in (*LAYOUT, *BATCH, "attention")
        if name not in _SAME_BITS and before[name] != frozen(config[name])
    ]
    changes = ", ".join(_change(before, config, name) for name in changed)
    return changes and f"losses may differ in the last bits, because these keys change the compiled program: {changes}"


def check_islands(saved: Mapping[str, Any], config: Config, where: str) -> None:
    """Refuses a checkpoint with another number of DiLoCo's islands. Also refuses another synchronization schedule if
    islands take over fragments late, because a fragment in flight would then never arrive.

    Args: see `check_resume`.

    Raises:
      UserError: names both numbers, or the keys that differ.
    """
    before = _with_defaults(saved)
    if not (before.enable_diloco and config.enable_diloco):
        return
    if islands(before) != islands(config):
        raise UserError(f"{where}: {_other_islands(before, config)}")
    late = before.enable_streaming_diloco and before.num_communication_overlapping_steps
    changes = ", ".join(_change(before, config, name) for name in TIMETABLE if before[name] != config[name])
    if late and changes:
        raise UserError(
            f"{where}: its islands may not have taken over the last fragment yet, and with another schedule they "
            f"never would, {changes}: use the old values, or continue with {_RESET}"
        )


def _rows_split(config: Config) -> tuple[int, str]:
    count = parts(config)
    return count, config.context_parallel_strategy if count > 1 else ""


def islands_of(saved: Mapping[str, Any]) -> int:
    """Returns the number of DiLoCo's islands in a checkpoint with the configuration `saved`; 0 without DiLoCo."""
    before = _with_defaults(saved)
    return islands(before) if before.enable_diloco else 0


def _other_islands(before: Any, config: Config) -> str:
    return (
        f"the number of DiLoCo's islands must not change, {islands(before)} -> {islands(config)}: each has its own "
        "optimizer state; load_parameters_path begins a new run from the outer parameters"
    )


def check_optimizer(saved: Mapping[str, Any], config: Config, where: str) -> None:
    """Refuses optimizer state of another `opt_type`, even if its arrays have the same names and shapes.

    Args: see `check_resume`.

    Raises:
      UserError: names both.
    """
    theirs = _with_defaults(saved).opt_type
    if theirs != config.opt_type:
        raise UserError(
            f"{where} holds the optimizer state of {theirs}, and this command has opt_type={config.opt_type}: give "
            f"opt_type={theirs}, or continue with {_RESET}"
        )


def resets(saved: Mapping[str, Any], config: Config) -> bool:
    """Returns whether `reset_optimizer` applies to a run's own checkpoint with the configuration `saved`.

    It does not apply if the checkpoint was saved with that key and the same optimizer. So repeating the same command
    resumes the run.
    """
    before = _with_defaults(saved)
    again = before.reset_optimizer and all(before[name] == frozen(config[name]) for name in UPDATE)
    return config.reset_optimizer and not again


def _with_defaults(saved: Mapping[str, Any]) -> Any:
    return ml_collections.FrozenConfigDict(
        {name: frozen(saved.get(name, key.default)) for name, key in schema().keys.items()}
    )


def _change(before: Any, config: Config, name: str) -> str:
    changed = f"{name}: {to_flow(before[name])} -> {to_flow(config[name])}"
    return f"{changed} (the checkpoint has the optimizer state of {before[name]})" if name == "opt_type" else changed
