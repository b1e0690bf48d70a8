"""The keys of evaluation in a run."""

from trainer.config.key_rows import Inert, Resume, Row

ROWS = (
    # If evaluation takes its rows from the training documents, the fingerprint of the data detects a change.
    Row(
        ("eval_interval", "eval_steps", "eval_per_device_batch_size", "mtp_eval_target_module"),
        Resume.AROUND,
        step=False,
    ),
)
INERT = (
    Inert(
        ("eval_steps", "eval_per_device_batch_size", "mtp_eval_target_module"),
        lambda c: c.eval_interval <= 0,
        "eval_interval disables evaluation",
    ),
)
