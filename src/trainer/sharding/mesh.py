"""The device mesh."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from trainer.config import mesh_axes


def make_mesh(config, devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of `devices` with the axes and sizes of a resolved configuration, the outermost axis first.

    Axes are of JAX's automatic kind: the compiler propagates what `constrain` and the state's shardings say.
    """
    axes = mesh_axes(config)
    if devices[0].platform == "cpu":
        grid = np.asarray(devices).reshape(tuple(axes.values()))
    else:
        # Neighbours on the mesh should be neighbours on the chip's network.
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(tuple(axes.values()), devices=devices)
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
