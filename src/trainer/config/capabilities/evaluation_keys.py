"""Keys for evaluation during training."""

from trainer.config.key_rows import Inert, Resume, Row

ROWS = (
    # These keys may change on resume. If evaluation holds out a part of the training documents, another value of a key
    # may change the training rows; the run then refuses to resume, because the data's fingerprint differs.
    Row(
        (
            *("eval_interval", "eval_steps", "eval_per_device_batch_size", "mtp_eval_target_module"),
            *("eval_tasks_interval", "eval_tasks_limit", "eval_tasks_timeout_seconds", "abort_on_eval_tasks_error"),
            "eval_tasks_allow_code",
        ),
        Resume.AROUND,
        step=False,
    ),
    Row(("eval_tasks",), Resume.AROUND, step=False, code=True),
)
INERT = (
    Inert(
        ("eval_steps", "eval_per_device_batch_size", "mtp_eval_target_module"),
        lambda c: c.eval_interval <= 0,
        "eval_interval disables evaluation",
    ),
    Inert(("eval_tasks_interval", "abort_on_eval_tasks_error"), lambda c: not c.eval_tasks, "eval_tasks is empty"),
)
