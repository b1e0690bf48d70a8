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


SPARSITY_CHECKS = (((N, M), _counts),)
SPARSITY_INERT = (
    ((START, EVERY), lambda c: c[N] is None and c[M] is None, "no weights are masked without weight_sparsity_n"),
    ((N, M, START, EVERY), lambda c: c[START] > c.steps, f"the first masks are made after {START} steps, not in these"),
)
