"""The keys on which the compiled training step depends."""

from trainer.config.schema import schema

# Sections of base.yml whose keys do not affect the step, and the exceptions among them, which do.
_OTHER_SECTIONS = {
    "Run and output",
    "Checkpoints",
    "Data",
    "Generation",
    "Ahead-of-time compilation",
    "Several processes",
}
_INCLUDED = {"record_internal_nn_metrics", "parameter_metrics_period", "max_target_length", "per_device_batch_size"}
# Keys of the other sections that do not affect the step. The schedule reads learning_rate_schedule_steps, not steps;
# only DiLoCo's step depends on steps, see `aot.executable.origin_of`.
_EXCLUDED = {
    "steps",
    "eval_interval",
    "eval_steps",
    "eval_per_device_batch_size",
    "mtp_eval_target_module",
    "debug_sharding",
    "sharding_tolerance",
    "lora_restore_path",
    "dpo_max_prompt_length",
    *("batch_size", "num_batches", "rollout_micro_batch_size", "rl_num_generations", "rl_num_iterations"),
    *("reward_functions", "reward_num_workers", "reward_worker_timeout_seconds"),
}


def step_keys() -> list[str]:
    """Returns the keys on whose resolved values the compiled step depends."""
    included = [
        key.name for key in schema().keys.values() if key.section not in _OTHER_SECTIONS or key.name in _INCLUDED
    ]
    return [name for name in included if name not in _EXCLUDED]
