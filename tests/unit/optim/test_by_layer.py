"""Stacked layers get the same updates as layers in separate arrays."""

import jax
import numpy as np
import pytest
from optim_cases import config_of

from trainer.optim.optimizer import make_optimizer
from trainer.sharding import Axes

# The number of layers exceeds every other axis, so that rows and columns could be confused with layers.
SHAPES = {
    "matrix": (4, 3, 3),
    "heads": (4, 3, 3, 2),
    "norm": (4, 3),
    "other stack": (2, 3, 3),
    "scalar": (4, 1),
    "row": (4, 1, 3),
}
NAMES = {
    "matrix": ("layers", "embed", "mlp"),
    "heads": ("layers", "embed", "heads", "kv"),
    "norm": ("layers", "norm"),
    "other stack": ("layers", "embed", "mlp"),
    "scalar": ("layers", None),
    "row": ("layers", None, "embed"),
}
UPDATES = 2
KEYS = {
    "adafactor_min_dim_size_to_factor": 1,
    "adafactor_clipping_threshold": 0.5,
    "adafactor_momentum": 0.9,
    "adafactor_weight_decay": 0.01,
    "gradient_clipping_threshold": 0,  # clipping uses a norm over all parameters
}


def drawn(seed):
    rng = np.random.default_rng(seed)
    # Layers of very different magnitudes, so that a root mean square over several layers differs from each layer's.
    return {
        name: (
            rng.normal(size=shape) * 10.0 ** np.arange(-1, shape[0] - 1).reshape(-1, *[1] * (len(shape) - 1))
        ).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def unrolled(tree):
    return {f"{name} {i}": layer for name, stack in tree.items() for i, layer in enumerate(stack)}


def trained(opt_type, axes, split):
    config = config_of(opt_type=opt_type, **KEYS)
    tx = make_optimizer(config, axes)
    params = split(drawn(0))
    state = jax.jit(tx.init)(params)
    update = jax.jit(tx.update)
    for step in range(UPDATES):
        updates, state = update(split(drawn(step + 1)), state, params)
        params = jax.tree.map(lambda old, change: old + np.asarray(change), params, updates)
    return params


# The other optimizers work element by element.
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_stacked_layers_train_as_unrolled_ones(name):
    stacked = trained(name, {name: Axes(names) for name, names in NAMES.items()}, lambda tree: tree)
    axes = {f"{name} {i}": Axes(names[1:]) for name, names in NAMES.items() for i in range(SHAPES[name][0])}
    for key, layer in trained(name, axes, unrolled).items():
        kind, _, i = key.rpartition(" ")
        # Sums in another order; Newton-Schulz amplifies the difference.
        rtol = 1e-4 if name == "muon" else 1e-5
        np.testing.assert_allclose(
            stacked[kind][int(i)], layer, rtol=rtol, atol=rtol * np.abs(layer).max(), err_msg=key
        )
