"""Everything that pairs trees with trees: a train state, its logical axes, its shardings."""

from trainer.state.init import init_state_fn
from trainer.state.shardings import abstract_state, logical_axes, state_shardings

__all__ = ["abstract_state", "init_state_fn", "logical_axes", "state_shardings"]
