"""The maximum number of documents that share a row of training data. Attention kernels use it to save memory and
time."""

from trainer.config.capabilities.token_keys import most_segments, token_files
from trainer.config.derived import has_rollouts
from trainer.config.keys import Config

SYNTHETIC = 4  # the number of documents in a row of synthetic data
# The keys on which `most_documents` depends.
OF_ROWS = (
    *("use_grpo", "use_dpo", "use_distill", "distill_rollouts", "dataset_type", "grain_file_type", "packing"),
    *("max_segments_per_seq", "max_target_length", "reset_attention_mask", "packing_max_segments_per_sample"),
)


def most_documents(config: Config) -> int | None:
    """Returns the maximum number of documents that a row of the configured training data can contain.

    0 means that each row is one document without padding, except perhaps the last row of the data. None means that the
    maximum is unknown until the rows are made.
    """
    if has_rollouts(config):
        return None
    if token_files(config):
        return most_segments(config) if config.reset_attention_mask else 0
    together = 2 if config.use_dpo else 1  # both sequences of a preference pair are in one row
    if not config.packing:
        return together
    if config.dataset_type == "synthetic":
        return SYNTHETIC
    return config.max_segments_per_seq * together if config.max_segments_per_seq > 0 else None
