"""The keys of context parallelism."""

from trainer.config.derived import mesh_axes
from trainer.config.keys import Config

STRATEGY, BALANCE = "context_parallel_strategy", "context_parallel_load_balance"
ORDER = "context_parallel_reorder_strategy"
CONTEXT, ULYSSES = "context", "context_usp_ulysses"  # the mesh axes


def parts(config: Config) -> int:
    """Returns over how many devices the tokens of a row are split."""
    sizes = mesh_axes(config)
    return sizes[CONTEXT] * sizes[ULYSSES]


def token_order(config: Config) -> tuple[str, int] | None:
    """Returns the strategy and the number of devices of the order of tokens (`ops.order`) in a batch on devices; None
    if they stay in their order. Ulysses splits heads, so its work is balanced in any order."""
    n = mesh_axes(config)[CONTEXT]
    if n == 1 or not config[BALANCE] or config[STRATEGY] == "ulysses":
        return None
    if config[ORDER] != "auto":
        return str(config[ORDER]), n
    ring = config[STRATEGY] in ("ring", "usp")
    return "striped" if ring and config.packing else "dual_chunk_swap", n
