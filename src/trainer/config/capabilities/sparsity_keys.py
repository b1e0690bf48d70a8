"""Keys of N:M weight sparsity, and their checks."""

from trainer.config.keys import Config

N, M = "weight_sparsity_n", "weight_sparsity_m"
START, EVERY = "weight_sparsity_start_step", "weight_sparsity_update_step"


def is_sparse(config: Config) -> bool:
    """Whether weights are masked."""
    return config[N] is not None


def _counts(config: Config) -> str | None:
    n, m = config[N], config[M]
    if n is None and m is None:
        return None
    if n is None or m is None:
        return "both are needed: at most n of m consecutive weights are used"
    return None if 1 <= n < m else "must be 1 <= n < m: at most n of m consecutive weights are used"


_NONE_MADE = f"steps is less than {START}, so that no masks are made"
SPARSITY_CHECKS = (((N, M), _counts),)
SPARSITY_INERT = (
    ((START, EVERY), lambda c: c[N] is None and c[M] is None, "no weights are masked without weight_sparsity_n"),
    ((EVERY,), lambda c: c[START] > c.steps, _NONE_MADE),
    # A checkpoint may have masks.
    ((N, M), lambda c: c[START] > c.steps and not (c.load_parameters_path or c.load_full_state_path), _NONE_MADE),
)
