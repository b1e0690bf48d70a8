"""Which keys make the compiled training step, and which only say what is done around it."""

from trainer.config.schema import schema

# Sections of base.yml whose keys do not enter the step, and those of their keys that do.
_AROUND = {"Run and output", "Checkpoints", "Data", "Ahead-of-time compilation", "Several processes"}
_BUT = {"record_internal_nn_metrics", "max_target_length", "per_device_batch_size"}
# Keys of other sections that do not. The schedule's length is learning_rate_schedule_steps.
_BESIDES = {
    "steps",
    "eval_interval",
    "eval_steps",
    "eval_per_device_batch_size",
    "prompt",
    "decode_sampling_temperature",
    "debug_sharding",
    "sharding_tolerance",
}


def step_keys() -> list[str]:
    """The keys of which the compiled step is made, as far as their values are resolved."""
    keys = schema().keys.values()
    return [key.name for key in keys if key.name not in _BESIDES and (key.section not in _AROUND or key.name in _BUT)]
