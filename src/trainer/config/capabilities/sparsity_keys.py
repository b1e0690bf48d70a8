"""Keys of N:M weight sparsity, and their checks."""

from trainer.config.key_rows import Check, Inert, Resume, Row
from trainer.config.keys import Config


def is_sparse(config: Config) -> bool:
    """Whether weights are masked."""
    return config.weight_sparsity_n is not None


def _counts(config: Config) -> str | None:
    n, m = config.weight_sparsity_n, config.weight_sparsity_m
    if n is None and m is None:
        return None
    if n is None or m is None:
        return "both are needed: at most n of m consecutive weights are used"
    return None if 1 <= n < m else "must be 1 <= n < m: at most n of m consecutive weights are used"


_NONE_MADE = "steps is less than weight_sparsity_start_step, so no masks are made"
# A user may increase this key to keep the masks constant for the last part of training.
ROWS = (Row(("weight_sparsity_update_step",), Resume.AROUND),)
CHECKS: tuple[Check, ...] = ((("weight_sparsity_n", "weight_sparsity_m"), _counts),)
INERT = (
    Inert(
        ("weight_sparsity_start_step", "weight_sparsity_update_step"),
        lambda c: c.weight_sparsity_n is None and c.weight_sparsity_m is None,
        "no weights are masked without weight_sparsity_n",
    ),
    Inert(("weight_sparsity_update_step",), lambda c: c.weight_sparsity_start_step > c.steps, _NONE_MADE),
    # With a loaded checkpoint, these keys have an effect, because the checkpoint may contain masks.
    Inert(
        ("weight_sparsity_n", "weight_sparsity_m"),
        lambda c: c.weight_sparsity_start_step > c.steps and not (c.load_parameters_path or c.load_full_state_path),
        _NONE_MADE,
    ),
)
