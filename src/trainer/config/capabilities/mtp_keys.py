"""Checks of the keys of multi-token prediction."""

from trainer.config.key_rows import Check, Inert, refused
from trainer.config.keys import Config


def _modules(config: Config) -> str | None:
    longest = config.max_target_length - 1
    if config.mtp_num_layers <= longest:
        return None
    return f"module k predicts the token k + 1 positions ahead, so a row has a loss for at most {longest} modules"


CHECKS: tuple[Check, ...] = (
    (("mtp_num_layers", "max_target_length"), _modules),
    refused(
        ("mtp_eval_target_module", "mtp_num_layers"),
        lambda c: c.mtp_eval_target_module > c.mtp_num_layers,
        "there is no such module: modules are numbered from 1 to mtp_num_layers; 0 evaluates none",
    ),
)
INERT = (Inert(("mtp_loss_scaling_factor",), lambda c: not c.mtp_num_layers, "mtp_num_layers=0"),)
