"""The keys for a run's length and its learning rate schedule."""

from trainer.config.key_rows import Check, Inert, Resume, Row, refused
from trainer.config.keys import Config


def _schedule_shares(config: Config) -> str | None:
    total = config.warmup_steps_fraction + config.wsd_decay_steps_fraction
    if config.lr_schedule_type != "wsd" or total <= 1 + 1e-9:
        return None
    return f"with lr_schedule_type=wsd warm-up and decay together are {total:g} of the schedule; the maximum is 1"


ROWS = (
    # The learning rate schedule reads `learning_rate_schedule_steps` instead of `steps`, so the compiled step depends
    # on `steps` only with DiLoCo (see trainer.aot.executable).
    Row(("steps",), Resume.LENGTH, step=False),
    Row(("learning_rate_schedule_steps",), Resume.LENGTH),
    Row(
        (
            *("learning_rate", "learning_rate_final_fraction", "lr_schedule_type", "warmup_steps_fraction"),
            *("wsd_decay_steps_fraction", "wsd_decay_style"),
        ),
        Resume.UPDATE,
    ),
    Row(("per_device_batch_size", "gradient_accumulation_steps"), Resume.BATCH),
)
CHECKS: tuple[Check, ...] = (
    (("warmup_steps_fraction", "wsd_decay_steps_fraction"), _schedule_shares),
    refused(
        ("steps", "learning_rate_schedule_steps"),
        lambda c: c.steps == c.learning_rate_schedule_steps == -1,
        "with -1 each follows the other; set one of them to a number",
    ),
)
INERT = (
    Inert(
        ("wsd_decay_steps_fraction", "wsd_decay_style"),
        lambda c: c.lr_schedule_type != "wsd",
        "lr_schedule_type is not wsd",
    ),
    Inert(
        ("learning_rate_final_fraction",),
        lambda c: c.lr_schedule_type == "constant",
        "lr_schedule_type=constant stays at the peak",
    ),
)
