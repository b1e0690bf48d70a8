"""Checkpoints of small trees, for tests of the manager."""

import jax
import ml_collections
import numpy as np
import optax
from support import zeros

from trainer.backends.base import TrainTree
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.sidecar import Sidecar

SIDECAR = Sidecar("base_config: base.yml\n", {"row": 3}, "corpus 1", {"tokenizer.json": b"{}"})
SETTINGS = {
    "async_checkpointing": True,
    "max_num_checkpoints_to_keep": None,
    "checkpoint_keep_period": 0,
    "keep_best_checkpoints": 0,
    "keep_best_metric": "min:eval_loss",
}


def settings(**changes):
    return ml_collections.ConfigDict(SETTINGS | changes)


def small_tree(value=0.0, width=4):
    params = {"layer": {"kernel": np.full((width, width), value, np.float32)}}
    opt_state = zeros(jax.eval_shape(optax.adam(0.1).init, params))
    return jax.device_put(TrainTree(np.int32(3), params, opt_state, {}))


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def saved(folder, updates=3, tree=None, sidecar=SIDECAR, **changes):
    """Returns the folder of a checkpoint in a new run's folder."""
    with CheckpointManager(folder, settings(**changes), say=print) as manager:
        manager.save(updates, small_tree() if tree is None else tree, sidecar, {})
        return manager.path(updates)
