"""The configuration of a teacher, derived from its student's."""

from typing import Any

from trainer.config.capabilities.context_keys import KEYS as CONTEXT_KEYS
from trainer.config.capabilities.documents import OF_ROWS
from trainer.config.derived import DCN, ICI
from trainer.config.flags import FLAGS
from trainer.config.keys import Config
from trainer.config.schema import schema

# The teacher uses the student's values of these keys, because both models share the mesh and the rows.
SHARED = (
    *FLAGS,
    "enable_diloco",
    *ICI.values(),
    *DCN.values(),
    *CONTEXT_KEYS,
    *OF_ROWS,
    *("logical_axis_rules", "sharding_tolerance"),
    *("per_device_batch_size", "gradient_accumulation_steps", "num_vocab_tiling"),
    *("eval_interval", "eval_per_device_batch_size", "batch_invariant"),
)


def teacher_values(config: Config) -> dict[str, Any]:
    """Returns the teacher's configuration, not yet resolved. `config`: the student's resolved configuration, whose
    teacher_overrides contains all keys of the teacher's model (see `weights.teacher_files`)."""
    overrides: Any = {name: value for name, value in config.teacher_overrides.items() if value != "auto"}
    dtype = overrides.get("dtype", config.dtype)
    values = {name: key.default for name, key in schema().keys.items()}
    # The teacher is not updated, so its weights need not be more precise than its computations.
    return values | {"dtype": dtype, "weight_dtype": dtype} | overrides | {name: config[name] for name in SHARED}
