"""The keys on which the compiled training step depends."""

from trainer.config.capabilities.table import ROWS
from trainer.config.schema import schema


def step_keys() -> list[str]:
    """Returns the keys on whose resolved values the compiled step depends."""
    others = {name for row in ROWS if not row.step for name in row.names}
    return [name for name in schema().keys if name not in others]
