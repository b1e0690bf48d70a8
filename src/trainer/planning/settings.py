"""Describes the settings of a point for tables and messages."""

from typing import Any

from trainer.config.dump import as_words
from trainer.planning.space import Changes

AS_GIVEN = "as given"
# Boolean settings, each with its text in a table if the setting is on.
_PLAIN = {
    "shard_optimizer_over_data": "Zero-1",
    "optimizer_memory_host_offload": "optimizer on the host",
    "parameter_memory_host_offload": "parameters on the host",
}


def settings_text(changes: Changes) -> str:
    """Returns the settings of a point for a table. Leaves out mesh axes of size 1 and settings that are off."""
    return ", ".join(text for key, value in changes.items() if (text := _setting(key, value))) or AS_GIVEN


def _setting(key: str, value: Any) -> str:
    if key.startswith(("ici_", "dcn_")) and key.endswith("_parallelism"):
        over = " over slices" if key.startswith("dcn_") else ""
        return f"{key[4:].removesuffix('_parallelism')} {value}{over}" if value != 1 else ""
    if key == "per_device_batch_size":
        return f"{value:g} {'row' if value == 1 else 'rows'}"
    if key == "gradient_accumulation_steps":
        return f"{value} microbatches" if value > 1 else ""
    if key == "num_vocab_tiling":
        return "" if value == 1 else f"{'automatic' if value == -1 else value} vocabulary tiles"
    if key in _PLAIN:
        return _PLAIN[key] if value else ""
    return value if key == "remat_policy" else as_words({key: value})[0]
