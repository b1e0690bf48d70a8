"""Trees with the structure of a train state: its logical axes and its shardings.

The public names are importable from here; docs/guides/state-sharding.md shows their use.
"""

from trainer.backends import TrainStateNNX
from trainer.sharding import get_mesh_from_config
from trainer.state import table
from trainer.state.builders import (
    AbstractState,
    build_zero1_input_state_mesh_shardings,
    get_abstract_state_nnx,
    get_named_sharding_nnx,
    get_partition_spec_nnx,
    set_named_sharding_nnx,
)
from trainer.state.diloco import (
    DiLoCoTrainState,
    build_abstract_diloco_state,
    build_diloco_state,
)
from trainer.state.init import init_state_fn
from trainer.state.layout import pick_spec, state_layout, state_to_sharded_layout
from trainer.state.muon import get_muon_weight_dimension_numbers
from trainer.state.shardings import ParamShardings, Tensor, gathered_stages, state_shardings, tensors
from trainer.state.tolerance import check_tolerance

__all__ = [
    "AbstractState",
    "DiLoCoTrainState",
    "ParamShardings",
    "Tensor",
    "TrainStateNNX",
    "build_abstract_diloco_state",
    "build_diloco_state",
    "build_zero1_input_state_mesh_shardings",
    "check_tolerance",
    "gathered_stages",
    "get_abstract_state_nnx",
    "get_mesh_from_config",
    "get_muon_weight_dimension_numbers",
    "get_named_sharding_nnx",
    "get_partition_spec_nnx",
    "init_state_fn",
    "pick_spec",
    "set_named_sharding_nnx",
    "state_layout",
    "state_shardings",
    "state_to_sharded_layout",
    "table",
    "tensors",
]
