"""Which keys may differ between a checkpoint and the command that resumes from it."""

from collections.abc import Mapping
from typing import Any

import ml_collections

from trainer.config.derived import DCN, ICI, global_batch_rows
from trainer.config.dump import PROCESSES, to_flow
from trainer.config.errors import UserError
from trainer.config.flags import FLAGS
from trainer.config.resolve import frozen
from trainer.config.schema import schema
from trainer.config.tiles import KEYS as TILES
from trainer.config.vocab_tiles import KEY as TILES_OF_THE_LOSS

# How the program is sharded and where it runs. These affect the training result only by the order of sums
# and, for `num_vocab_tiling` in bfloat16, by the rounding of the head's gradient.
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
    *TILES.values(),
    TILES_OF_THE_LOSS,
    *PROCESSES,
)
# The same global batch may be split differently.
BATCH = ("per_device_batch_size", "gradient_accumulation_steps")
# The length of the run; the schedule follows it if it is not given.
LENGTH = ("steps", "learning_rate_schedule_steps")
# What is written, kept, printed and evaluated, and what happens to a bad step. If evaluation takes its rows from the
# training documents, the fingerprint of the data detects a change.
AROUND = (
    "run_name",
    "base_output_directory",
    "log_config",
    "metrics_file",
    "log_period",
    "record_internal_nn_metrics",
    "enable_checkpointing",
    "checkpoint_period",
    "save_checkpoint_on_start",
    "save_checkpoint_on_completion",
    "async_checkpointing",
    "max_num_checkpoints_to_keep",
    "checkpoint_keep_period",
    "keep_best_checkpoints",
    "abort_on_nan_loss",
    "abort_on_inf_loss",
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
    "prompt",
    "decode_sampling_temperature",
    "override_model_config",
    "compile_topology",
    "compile_topology_num_slices",
    "compiled_trainstep_file",
    "compile_report_file",
    "model_name",  # a name for sizes; the sizes themselves are compared
)
MAY_CHANGE = frozenset((*LAYOUT, *BATCH, *LENGTH, *AROUND))


def check_resume(saved: Mapping[str, Any], config: Any, schedule_given: bool, where: str) -> list[str]:
    """Warnings about resuming from a checkpoint of configuration `saved` under `config`.

    Args:
      saved: the keys of a config.yml. A missing key was added to base.yml later; its default is the old behaviour.
      config: resolved.
      schedule_given: the command gives `learning_rate_schedule_steps`.
      where: the checkpoint, for the message.

    Raises:
      UserError: a key differs that must not; the message has the old and new values.
    """
    old = {name: frozen(saved.get(name, key.default)) for name, key in schema().keys.items()}
    differing = [name for name in old if old[name] != frozen(config[name])]
    before = ml_collections.FrozenConfigDict(old)
    wrong = [_change(before, config, name) for name in differing if name not in MAY_CHANGE]
    if global_batch_rows(before) != global_batch_rows(config):
        changes = ", ".join(_change(before, config, name) for name in BATCH if name in differing)
        rows = f"{global_batch_rows(before)} -> {global_batch_rows(config)} rows"
        wrong.append(f"the global batch must not change, {rows}: {changes or 'another number of devices'}")
    warnings = []
    if "learning_rate_schedule_steps" in differing:
        change = _change(before, config, "learning_rate_schedule_steps")
        if schedule_given or before.learning_rate_schedule_steps != before.steps:
            wrong.append(change)
        else:
            warnings.append(f"the learning rate schedule follows steps: {change}")
    if wrong:
        lines = "\n  ".join(wrong)
        raise UserError(
            f"{where} was saved with another configuration (old -> new):\n  {lines}\n"
            "use the old values, or choose another run_name for a new run"
        )
    return warnings


def _change(before: Any, config: Any, name: str) -> str:
    return f"{name}: {to_flow(before[name])} -> {to_flow(config[name])}"
